"""Hooks of mkdocs: generate reference and project pages, and refuse pages that load anything from the network.

The reference is driven by `__all__`: one page for `silodp` and one for each of its packages that declares `__all__`.
A name that is not listed there is not documented.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROJECT_PAGES = {
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "security": "SECURITY.md",
    "measurements": "packages/silodp-experiments/RESULTS.md",
}

# What makes a browser load something; an <a href> is only an outbound link and may stay.
_LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//"""
    r"""|class=["']?mermaid""",  # the theme fetches mermaid's renderer
    re.IGNORECASE,
)
_LOADS_FROM_CSS = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""", re.IGNORECASE)


# --- API reference ------------------------------------------------------------------------------------------------


def public_packages() -> list[ModuleType]:
    """Return `silodp` and its direct public packages that declare a non-empty `__all__`."""
    sys.path[:0] = [str(path) for path in ROOT.glob("packages/*/src") if str(path) not in sys.path]
    root = importlib.import_module("silodp")
    names = [
        f"silodp.{found.name}"
        for found in pkgutil.iter_modules(root.__path__)
        if not found.name.startswith("_")
    ]
    packages = [root, *(importlib.import_module(name) for name in sorted(names))]
    return [package for package in packages if getattr(package, "__all__", None)]


def format_package(package: ModuleType) -> str:
    """Return the reference page of one package: its docstring, then every name in `__all__`.

    A module listed in `__all__` that has a page is linked, and documented in place otherwise.
    """
    own_pages = {page.__name__ for page in public_packages()}
    lines = [f"# {package.__name__}", "", (package.__doc__ or "").strip(), ""]
    for name in sorted(package.__all__, key=lambda name: (name[0].islower(), name.lower())):
        value = getattr(package, name)
        if isinstance(value, ModuleType) and value.__name__ in own_pages:
            lines += [f"## {name}", "", f"See [`{value.__name__}`]({value.__name__}.md).", ""]
            continue
        if isinstance(value, type) and value.__module__.partition(".")[0] != "silodp":
            # A class of a package beside silodp, which is exported by its name: no import leads to its source.
            place = f"{value.__module__}.{value.__qualname__}"
            lines += [f"## {name}", "", f"::: {place}", "    options:", "      show_root_heading: false", ""]
            continue
        lines += [f"::: {package.__name__}.{name}", ""]
        if not _is_documented_type(value):
            lines += ["    options:", "      show_if_no_docstring: true", ""]
    return "\n".join(lines)


def format_index(packages: list[ModuleType]) -> str:
    """Return the first page of the reference: every public package and what it exports."""
    lines = [
        "# API reference",
        "",
        "Everything that a program may import. Names that are not listed here may change without notice.",
        "",
        "| package | exports |",
        "|---|---|",
    ]
    for package in packages:
        names = ", ".join(f"`{name}`" for name in sorted(package.__all__, key=str.lower))
        lines.append(f"| [`{package.__name__}`]({package.__name__}.md) | {names} |")
    return "\n".join(
        [*lines, "", "The commands of the `silodp` program have [a separate page](../commands.md)."]
    )


def _is_documented_type(value: Any) -> bool:
    return isinstance(value, type | ModuleType) or callable(value)


# --- pages from the root of the repository ------------------------------------------------------------------------


def format_project_page(name: str) -> str:
    """Return a page outside docs/ (CONTRIBUTING.md, for example) with its links to docs/ as links between pages."""
    path = ROOT / name
    if not path.exists():  # of a package that this checkout leaves out
        return f"# {path.stem}\n\nThis checkout has no `{name}`."
    text = path.read_text().replace("](../../docs/", "](docs/")
    for page, file in PROJECT_PAGES.items():
        text = text.replace(f"]({file}", f"]({page}.md")
    return text.replace("](docs/", "](../").replace("](README.md)", "](../index.md)")


# --- what mkdocs calls --------------------------------------------------------------------------------------------


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that are not files in docs/."""
    from mkdocs.structure.files import File

    packages = public_packages()
    pages = {f"reference/{package.__name__}.md": format_package(package) for package in packages}
    pages["reference/index.md"] = format_index(packages)
    for page, file in PROJECT_PAGES.items():
        pages[f"project/{page}.md"] = format_project_page(file)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_config(config: Any) -> Any:
    """Put one entry for each public package into the API's part of the navigation."""
    (reference,) = (section["Reference"] for section in config.nav if "Reference" in section)
    (api,) = (section["API"] for section in reference if "API" in section)
    api += [{package.__name__: f"reference/{package.__name__}.md"} for package in public_packages()]
    return config


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Link the pages that docstrings cite as docs/NAME.md."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    return re.sub(r"\bdocs/(\w+)\.md\b", r'<a href="../\1.html">docs/\1.md</a>', html)


def on_post_build(*, config: Any) -> None:
    """Raise if a built page would load anything from the network."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css"):
            loads = _LOADS if path.suffix == ".html" else _LOADS_FROM_CSS
            found = loads.search(path.read_text())
            if found is not None:
                raise RuntimeError(f"{path} loads from the network: {found[0]!r}")
