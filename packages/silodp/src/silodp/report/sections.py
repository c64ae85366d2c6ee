"""Sections of a report: what one kind of result of a run shows on page, card, terminal and in --json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from markupsafe import Markup

from silodp._lazy import Registry, load, make_missing_error
from silodp.errors import SilodpError
from silodp.runtime.run_files import ATTACK, STATISTICS_PAGE
from silodp.text import name_class

if TYPE_CHECKING:  # both read sections
    from silodp.report.page import PictureFolder
    from silodp.report.run_record import RunRecord

Place = Literal["guarantee", "results", "after_results"]
"""Where a section stands on page and card: after what no ε covers, or after the results on held-out records.

"results" is inside the part of the page on results, "after_results" after it; a card has no place for the latter.
"""


@dataclass(frozen=True)
class Alarm:
    """What must not be overlooked: it stands first on page, card and terminal, and the model is not for release.

    Attributes:
        sentence: One sentence.
        on_page: What the page says beside it.
        on_card: What the card says beside it, Markdown.
    """

    sentence: str
    on_page: Markup
    on_card: str


class ReportSection:
    """A section of the report of a run; each method shows nothing unless a class defines it.

    A class of an entry point in the group "silodp.report_sections" is asked for every run whose files are read. It must
    import no code that these files name.
    """

    place: ClassVar[Place] = "results"
    pictures: ClassVar[tuple[str, ...]] = ()
    """First parts of the file names of its pictures, by which old ones are deleted."""
    files: ClassVar[tuple[str, ...]] = ()
    """The names of the files that `compose_pages` returns, which a signature of the report is over."""

    @classmethod
    def read(cls, directory: Path, run: RunRecord) -> ReportSection | None:
        """Read the section's files; None where the report shows nothing of it.

        Args:
            directory: The directory of the run.
            run: Its files, without sections.

        Raises:
            SilodpError: a file is damaged, or contradicts the run.
        """
        raise NotImplementedError

    @property
    def alarm(self) -> Alarm | None:
        """What must not be overlooked, if anything."""
        return None

    @property
    def measurements(self) -> str | None:
        """The id, on the page, of measurements of what an attacker learns; None without any."""
        return None

    def compose_pages(self, pictures: PictureFolder) -> Mapping[str, str]:
        """Return texts by file name, the page last, that stand in place of report.html; {} leaves it."""
        return {}

    def compose_html(self, pictures: PictureFolder) -> str:
        """Return HTML for the page: what a user or a file has named must be escaped, as `render` does."""
        return ""

    def describe_for_card(self) -> str:
        """Return Markdown for the card, which may be shared: nothing in it may be private."""
        return ""

    def to_json(self) -> Mapping[str, Any]:
        """Return entries for `silodp report --json`, by keys that nothing else there has."""
        return {}

    def describe(self) -> list[str]:
        """Return lines for the terminal."""
        return []


SECTIONS: Registry[type[ReportSection]] = Registry("report_sections", {})

_NEEDED = {ATTACK: ("attack", "audit"), STATISTICS_PAGE: ("statistics", "analytics")}
"""Files without whose section a report would mislead, with its name and the package that has it."""


def read_sections(directory: Path, run: RunRecord) -> dict[str, ReportSection]:
    """Return the sections of a run by name, those of silodp first.

    Raises:
        SilodpError: a file is damaged, or its section is of a package that is not installed (extension.missing).
    """
    for file, (name, extra) in _NEEDED.items():
        # A leak that an attack has found must not vanish from a page where the package is missing.
        if name not in SECTIONS and (directory / file).exists():
            raise make_missing_error(extra, str(directory / file))
    found = ((name, kind.read(directory, run)) for name, kind in _list_kinds())
    return {name: section for name, section in found if section is not None}


def merge_json(sections: Iterable[ReportSection], taken: Iterable[str]) -> dict[str, Any]:
    """Return the entries of all sections for `silodp report --json`.

    Args:
        sections: The sections, those of silodp first.
        taken: The keys that no section may have.

    Raises:
        SilodpError: a section has a key that is taken, or another one's (code plugin.returned).
    """
    found: dict[str, Any] = {}
    for section in sections:
        added = section.to_json()
        # A program that reads "report" must not find a stranger's text there.
        if twice := sorted(added.keys() & {*taken, *found}):
            raise SilodpError(
                f"{name_class(type(section))}.to_json returned the key '{twice[0]}', which is taken: give another one.",
                code="plugin.returned",
            )
        found |= added
    return found


def list_pictures() -> list[str]:
    """Return first parts of the file names of the pictures of all sections, also of those that a run has not."""
    return [name for _, kind in _list_kinds() for name in kind.pictures]


def list_files() -> list[str]:
    """Return the names of the files that sections write in place of report.html."""
    return [name for _, kind in _list_kinds() for name in kind.files]


def group_by_place(
    sections: Mapping[str, ReportSection], compose: Callable[[ReportSection], str]
) -> dict[Place, list[str]]:
    """Return the texts of sections by their place on page and card, without empty ones."""
    texts = [(section.place, compose(section)) for section in sections.values()]
    return {place: [text for where, text in texts if where == place and text] for place in get_args(Place)}


def _list_kinds() -> Iterator[tuple[str, type[ReportSection]]]:
    for name in sorted(SECTIONS):
        yield name, SECTIONS[name]
    for name, reference in sorted(SECTIONS.references.items()):
        yield name, load(reference)
