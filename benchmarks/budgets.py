"""How large the house may be: compare the sizes of source, tests and docs with budgets.toml, and fail above one.

python benchmarks/budgets.py [--write]: prints each size beside its budget; --write lowers the budgets to the sizes that
were reached. A budget is raised by hand only, in a commit that changes nothing else and says what was deleted for it.

Source and tests are counted in tokens of Python, without comments and docstrings, so that the length of a line does not
matter.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import tomli_w

from timing import show_help

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "budgets.toml"
_SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_IMPORTED = """
import sys
from silodp.cli import main
try:
    main.main(["epsilon", "--method", "uldp-avg", "--rounds", "10", "--noise-multiplier", "5"])
except SystemExit as ended:
    ended.code and sys.exit(ended.code)
    print(sum(name.split(".")[0].startswith("silodp") for name in sys.modules), file=sys.stderr)
"""


def count_tokens(folder: Path) -> int:
    """Return the number of tokens of the Python files in a folder, without comments and docstrings."""
    return sum(_count_tokens(path.read_text()) for path in folder.rglob("*.py"))


def _count_tokens(text: str) -> int:
    tokens = [
        token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _SKIPPED
    ]
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    return sum(token.start not in docstrings for token in tokens)


def count_words(paths: list[Path]) -> int:
    """Return the number of words of some pages."""
    return sum(len(path.read_text().split()) for path in paths)


def count_options() -> int:
    """Return the number of options of all commands, by the generated page of commands."""
    return len(re.findall(r"^\| <code>--", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE))


def count_modules() -> int:
    """Return how many modules of ours `silodp epsilon` imports."""
    done = subprocess.run([sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True)
    return int(done.stderr.splitlines()[-1])


def count_exports(source: Path) -> int:
    """Return the number of names in all lists `__all__`."""
    found = 0
    for path in source.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found += len(ast.literal_eval(node.value))
    return found


def measure() -> dict[str, dict[str, int]]:
    """Return all sizes, by the table and the name that they have in budgets.toml."""
    from silodp.errors import CODES

    source = ROOT / "src"
    packages = sorted(path.parent for path in source.glob("*/__init__.py"))
    tokens = {package.name: count_tokens(package) for package in packages}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        "tokens": {**tokens, "all": sum(tokens.values()), "tests": count_tokens(ROOT / "tests")},
        "words": {
            "docs": count_words(list((ROOT / "docs").rglob("*.md"))),
            "readme": count_words([ROOT / "README.md"]),
        },
        "numbers": {
            "dependencies": len(project["dependencies"]),
            "error_codes": len(CODES),
            "exports": count_exports(source),
            "modules_of_epsilon": count_modules(),
            "options": count_options(),
        },
    }


def list_excesses(sizes: dict[str, dict[str, int]], budgets: dict[str, dict[str, int]]) -> list[str]:
    """Return a sentence for each size above its budget, or without one."""
    found = []
    for table, values in sizes.items():
        for name, size in values.items():
            budget = budgets.get(table, {}).get(name)
            if budget is None:
                found.append(f"{table}.{name} has no budget: add it to {BUDGETS.name}.")
            elif size > budget:
                found.append(
                    f"{table}.{name} is {size:,}, and its budget {budget:,}: delete something for it."
                )
    return found


def main() -> int:
    """Print sizes and budgets; return 1 if a size is above its budget."""
    sizes, budgets = measure(), tomllib.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    for table, values in sizes.items():
        for name, size in values.items():
            print(f"{table + '.' + name:28} {size:>10,} of {budgets.get(table, {}).get(name, 0):>10,}")
    if "--write" in sys.argv:
        lowered = {
            table: {name: min(size, budgets.get(table, {}).get(name, size)) for name, size in values.items()}
            for table, values in sizes.items()
        }
        BUDGETS.write_text(
            f"# {__doc__.splitlines()[0]}\n# `make house` checks it.\n\n{tomli_w.dumps(lowered)}"
        )
        return 0
    excesses = list_excesses(sizes, budgets)
    print(*excesses, sep="\n", file=sys.stderr)
    return int(bool(excesses))


if __name__ == "__main__":
    show_help(__doc__)
    sys.exit(main())
