"""A section of a report: the remark in DIR/remark.txt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape
from matplotlib.figure import Figure

from silodp.report.sections import Alarm, ReportSection

if TYPE_CHECKING:
    from silodp.report.page import PictureFolder
    from silodp.report.run_record import RunRecord


@dataclass(frozen=True)
class RemarkSection(ReportSection):
    """What somebody remarked."""

    text: str

    pictures = ("remark",)

    @classmethod
    def read(cls, directory: Path, run: RunRecord) -> RemarkSection | None:
        path = directory / "remark.txt"
        return cls(path.read_text()) if path.exists() else None

    @property
    def alarm(self) -> Alarm | None:
        return Alarm(self.text, Markup("See the remark."), "Ask them.") if "wrong" in self.text else None

    def compose_html(self, pictures: PictureFolder) -> str:
        drawn = pictures.add("remark", Figure(), "A remark.")
        return f'<section id="remark">{escape(self.text)}<figure>{drawn.svg}</figure></section>'

    def describe_for_card(self) -> str:
        return f"- **Remark**: {self.text}"

    def to_json(self) -> Mapping[str, Any]:
        return {"remark": self.text}

    def describe(self) -> list[str]:
        return [f"Remark: {self.text}"]
