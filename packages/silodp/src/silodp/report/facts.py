"""What is known of a finished run: collected once from its files, for page, model card, checklist and templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silodp.accounting.guarantee import NOT_COVERED, ON_THE_LIST, Guarantee
from silodp.accounting.views import ADVERSARIES, Adversary
from silodp.assumption import Assumption
from silodp.config.schema import CardSection, parse_card
from silodp.errors import SilodpError
from silodp.parsing import MALFORMED, parse_json, parse_toml, refuse_malformed
from silodp.report.guarantee_text import collect_by_adversary
from silodp.report.run_record import RunRecord, read_run
from silodp.runtime.model_description import DESCRIPTION, ModelDescription
from silodp.runtime.run_files import CONFIG, RUN_SPEC

RESPONSIBILITY = {
    "intended_use": "Intended use",
    "purpose": "Purpose",
    "controllers": "Controllers",
    "legal_basis": "Legal basis",
    "period": "Period",
    "recipients": "Recipients",
    "retention": "Retention",
    "contact": "Contact",
}
"""What the owner declares in [card] for those who are responsible, with the names that readers see."""
NOT_STATED = "not stated"
_OTHER_METRICS = f"other {NOT_COVERED[0]} (noisy sums over the silos are covered)"


@dataclass(frozen=True)
class ListedAssumption(Assumption):
    """An assumption of a run, with the guarantees that rest on it.

    Attributes:
        against: The adversaries whose guarantees rest on it.
        is_shared: Whether all guarantees of the run rest on it.
    """

    against: tuple[Adversary, ...] = ()
    is_shared: bool = True


@dataclass(frozen=True)
class ReportData:
    """Everything that the files of a run state, for every text about it.

    Attributes:
        run: The files of the run, checked against its ledger.
        card: What the owner declares in [card] of config.toml.
        spec: The public constants of run_spec.json; {} where there is no such file.
        model: The description of the model; None for a run that releases none.
        has_readable_config: Whether config.toml is TOML; where it is not, `card` is empty.
    """

    run: RunRecord
    card: CardSection
    spec: Mapping[str, Any]
    model: ModelDescription | None
    has_readable_config: bool = True

    @property
    def released(self) -> Guarantee:
        """The guarantee against whoever sees the models."""
        return self.run.guarantees["released"]

    @property
    def private(self) -> tuple[Guarantee, ...]:
        """The guarantees that promise something."""
        return _list_private(self.run.guarantees)

    @property
    def assumptions(self) -> tuple[ListedAssumption, ...]:
        """Every assumption of the guarantees once."""
        return list_assumptions(self.run.guarantees)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What no ε covers, one clause each."""
        found = collect_by_adversary({one.adversary: one.not_covered for one in self.private})
        if self.run.summary.get("evaluation") == "sums" and self.released.private:
            return tuple(_OTHER_METRICS if text == NOT_COVERED[0] else text for text in found)
        return tuple(found)

    @property
    def has_public_list(self) -> bool:
        """Whether ε does not hide who is on the list of ids; pages say so beside ε."""
        return ON_THE_LIST in self.not_covered

    @property
    def responsibility(self) -> tuple[tuple[str, str], ...]:
        """The entries of `RESPONSIBILITY`, each with what the owner declares or `NOT_STATED`."""
        return tuple(
            (title, getattr(self.card, field) or NOT_STATED) for field, title in RESPONSIBILITY.items()
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; () where no file states them, or labels are no classes."""
        return self.model.classes if self.model else ()

    @property
    def users(self) -> int | None:
        """The public number of persons; None where no file states it."""
        users = self.spec.get("data", {}).get("users")
        return users if isinstance(users, int) else None

    @property
    def silos(self) -> tuple[str, ...]:
        """The names of the silos; () where no file states them."""
        return tuple(self.spec.get("data", {}).get("silos", ()))

    @property
    def method(self) -> str:
        """The settings of the method as they were declared; all of them for a run without a configuration."""
        try:
            declared = parse_toml(self.run.config or "")["method"]
            return ", ".join([declared.pop("name"), *_list_settings(declared)])
        except MALFORMED:
            return str(self.run.summary["settings"])

    @property
    def loss(self) -> str | None:
        """The name of the loss; None where no file states it."""
        loss = self.spec.get("model", {}).get("loss")
        return loss if isinstance(loss, str) else None


def _list_settings(table: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    """Return "name = value" of each setting in a table of TOML, and in the tables in it."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _list_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {json.dumps(value, ensure_ascii=False, default=str)}"


def list_assumptions(guarantees: Mapping[Adversary, Guarantee]) -> tuple[ListedAssumption, ...]:
    """Return every assumption of these guarantees once, in their order."""
    private = _list_private(guarantees)
    return tuple(
        ListedAssumption(**vars(one), against=tuple(against), is_shared=len(against) == len(private))
        for one, against in collect_by_adversary({one.adversary: one.assumptions for one in private}).items()
    )


def _list_private(guarantees: Mapping[Adversary, Guarantee]) -> tuple[Guarantee, ...]:
    return tuple(guarantees[adversary] for adversary in ADVERSARIES if guarantees[adversary].private)


def collect_facts(directory: Path, run: RunRecord | None = None) -> ReportData:
    """Read the files of a finished run that texts about it are made of.

    Args:
        directory: The directory of the run.
        run: Its files, where they have been read.

    Raises:
        SilodpError: a file is missing or damaged, files contradict each other, or a setting of [card] is wrong.
    """
    run = run or read_run(directory)
    card = _read_card(directory, run.config)
    description = directory / DESCRIPTION
    return ReportData(
        run=run,
        card=card or CardSection(),
        spec=_read_spec(directory / RUN_SPEC),
        model=ModelDescription.read(description) if description.exists() else None,
        has_readable_config=card is not None,
    )


def _read_card(directory: Path, config: str | None) -> CardSection | None:
    """Return [card] of config.toml; None where the file is not TOML."""
    try:
        values = parse_toml(config or "")
    except ValueError:  # a report shows such a file as it is, so texts are written all the same
        return None
    try:
        return parse_card(values)
    except SilodpError as error:
        raise SilodpError(f"{directory / CONFIG}: {error}", code=error.code, field=error.field) from None


def _read_spec(path: Path) -> Mapping[str, Any]:
    """Return the constants of run_spec.json, with the parts that texts need; {} where there is none."""
    if not path.exists():
        return {}
    with refuse_malformed(f"{path} is damaged: restore it from a copy.", code="report.damaged"):
        spec: Mapping[str, Any] = parse_json(path.read_bytes())
        data, model = spec["data"], spec["model"]
        if not all(isinstance(name, str) for name in data["silos"]):
            raise ValueError
        return {**spec, "data": dict(data), "model": dict(model)}
