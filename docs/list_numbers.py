"""Write the table of national numbers in docs/guides/identity.md anew, as their rules declare it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guides" / "identity.md"
_TABLE = re.compile(r"(?<=<!-- numbers -->\n).*(?=<!-- end -->)", re.DOTALL)


def fill_page(text: str) -> str:
    """Return the page with its table made anew."""
    sys.path[:0] = [str(path) for path in ROOT.glob("packages/*/src")]
    from silodp.data.identity.national import format_rules

    return _TABLE.sub(lambda _: f"\n{format_rules()}\n\n", text)


if __name__ == "__main__":
    PAGE.write_text(fill_page(PAGE.read_text()))
