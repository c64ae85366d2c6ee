"""The templates of this folder and of others: HTML pages, in which every value is escaped, and Markdown."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from silodp.report.formatting import FILTERS


def render(template: str, **values: Any) -> str:
    """Return a page from a template in this folder; in HTML every value is escaped unless it is `Markup`.

    Args:
        template: File name.
        values: The values, by their names in the template.
    """
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    """Return one environment for all pages: it keeps the compiled templates."""
    environment = make_environment(Path(__file__).parent)
    environment.filters |= FILTERS
    return environment


def make_environment(folder: Path) -> Environment:
    """Return what renders the templates of a folder; a missing value is an error.

    Every value is escaped as HTML, but in files .jinja, which are Markdown.
    """
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=select_autoescape(disabled_extensions=("jinja",), default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
