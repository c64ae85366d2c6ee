"""How large the house may be: compare the sizes of source, tests and docs with budgets.toml, and fail above one.

python benchmarks/budgets.py [--write]: prints each size beside its budget; --write lowers the budgets to the sizes that
were reached. A budget is raised by hand only, in a commit that changes nothing else and says what was deleted for it.

Source and tests are counted in tokens of Python, without comments and docstrings, so that the length of a line does not
matter.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import tomli_w

from house import EPSILON, EXPORTED, IMPORTED, ROOT, list_tokens, run_python
from timing import show_help

BUDGETS = ROOT / "budgets.toml"


def count_tokens(folder: Path) -> int:
    """Return the number of tokens of the Python files in a folder, without comments and docstrings."""
    return sum(len(list_tokens(path.read_text())) for path in folder.rglob("*.py"))


def count_words(paths: list[Path]) -> int:
    """Return the number of words of some pages."""
    return sum(len(path.read_text().split()) for path in paths)


def count_options() -> int:
    """Return the number of options of all commands, by the generated page of commands.

    An option that several commands share is described once, and counted for each of them.
    """
    _, _, sections = (ROOT / "docs" / "commands.md").read_text().partition("\n### `silodp ")
    shared = "".join(re.findall(r"^\[Shared\].*$", sections, re.MULTILINE))
    return len(re.findall(r"^- `--", sections, re.MULTILINE)) + shared.count("`--")


def measure() -> dict[str, dict[str, int]]:
    """Return all sizes, by the table and the name that they have in budgets.toml."""
    from silodp.errors import CODES

    packages = sorted(path.parent for path in ROOT.glob("packages/*/src/*/__init__.py"))
    tokens = {package.name: count_tokens(package) for package in packages}
    tests = [ROOT / "tests", *ROOT.glob("packages/*/tests")]
    project = tomllib.loads((ROOT / "packages/silodp/pyproject.toml").read_text())["project"]
    return {
        "tokens": {**tokens, "all": sum(tokens.values()), "tests": sum(map(count_tokens, tests))},
        "words": {
            "docs": count_words(list((ROOT / "docs").rglob("*.md"))),
            "readme": count_words([ROOT / "README.md"]),
        },
        "numbers": {
            "dependencies": len(project["dependencies"]),
            "error_codes": len(CODES),
            "exports": int(run_python(EXPORTED)[0]),
            "modules_of_epsilon": int(run_python(IMPORTED, *EPSILON)[0]),
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
        lowered |= {table: values for table, values in budgets.items() if table not in sizes}
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
