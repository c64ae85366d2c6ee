"""The section of a report on the attack that `silodp attack` made, or on how to make one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from silodp.report.formatting import render
from silodp.report.sections import Alarm, ReportSection
from silodp_audit.report.attacks import (
    CANNOT_SHOW,
    AttackRecord,
    describe_attack,
    describe_for_card,
    describe_scope,
    read_attack,
)

if TYPE_CHECKING:
    from silodp.report.page import PictureFolder
    from silodp.report.run_record import RunRecord

_ON_PAGE = """\
An attack on made-up persons, described <a href="#attacked">below</a>, found
{}.
Report it to the authors of silodp, or of the plug-in."""
_FOUND = {
    "violation": "that an attacker learns more than the ε on this page allow",
    "noise": "other noise than the ε on this page are computed from",
}
"""What an attack with this verdict found."""
_ROC = (
    "How often a member is recognized (true positive rate) when others are taken for members so often (false positive "
    "rate), on linear and logarithmic axes. Dashed: what the promise allows at most; band: the measured curve with its "
    "limits at {confidence}, each on its own. Some may lie above the promise by chance: the verdict is about the AUC."
)
_NOISE = (
    "Measured noise, shift and sampling as a share of what is claimed, with intervals at {confidence} for all tests "
    "together{failed}."
)


@dataclass(frozen=True)
class AttackSection(ReportSection):
    """What an attack measured on a run.

    Attributes:
        record: The attack; None where there was none.
        directory: The directory of the run.
        rounds: The number of rounds that the run was charged for.
        by_sums: Whether the run has an evaluation by sums, which is attacked by itself.
    """

    record: AttackRecord | None
    directory: Path
    rounds: int
    by_sums: bool

    place = "guarantee"
    pictures = ("attack", "noise")

    @classmethod
    def read(cls, directory: Path, run: RunRecord) -> AttackSection:
        """Read attack.json."""
        return cls(
            read_attack(directory, run.guarantees),
            directory,
            run.guarantees["released"].rounds,
            run.summary.get("evaluation") == "sums",
        )

    @property
    def alarm(self) -> Alarm | None:
        """The sentence on a promise that was contradicted, or on a test of noise that failed."""
        if self.record is None or self.record.alarm is None:
            return None
        on_page = Markup(_ON_PAGE).format(_FOUND[self.record.verdict])
        return Alarm(self.record.alarm, on_page, "An attack on made-up persons showed it.")

    @property
    def measurements(self) -> str | None:
        """The id of the section, where there was an attack."""
        return None if self.record is None else "attacked"

    def compose_html(self, pictures: PictureFolder) -> str:
        """Return the section of the page."""
        return render(
            Path(__file__).with_name("attacked.html"),
            attack=self.record,
            pictures={} if self.record is None else _draw(self.record, pictures),
            scope=[] if self.record is None else describe_scope(self.record, self.rounds),
            cannot_show=CANNOT_SHOW,
            by_sums=self.by_sums,
        )

    def describe_for_card(self) -> str:
        """Return what the card says of the attack."""
        return describe_for_card(self.record, self.rounds, self.by_sums)

    def to_json(self) -> Mapping[str, Any]:
        """Return the verdict; None without an attack."""
        return {"attack": self.record and self.record.verdict}

    def describe(self) -> list[str]:
        """Return what was measured, or how to measure it."""
        command = shlex.join(["silodp", "attack", str(self.directory)])
        return describe_attack(self.record, self.rounds, command)


def _draw(attack: AttackRecord, pictures: PictureFolder) -> dict[str, Any]:
    """Return the pictures of an attack by name, without those of what it has not measured."""
    from silodp_audit.report.attack_plots import (
        plot_noise,
        plot_roc,
    )  # a second, which a verification need not wait for

    failed = "" if attack.verdict == "consistent" else "; a cross marks a test that failed"
    drawn = {
        "attack": (plot_roc(attack), _ROC.format(confidence=attack.confidence)),
        "noise": (plot_noise(attack.noise), _NOISE.format(confidence=attack.confidence, failed=failed)),
    }
    return {
        name: pictures.add(name, figure, caption)
        for name, (figure, caption) in drawn.items()
        if figure is not None
    }
