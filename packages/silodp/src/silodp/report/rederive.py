"""The guarantees of a finished run, derived again from its specification, its ledger and the store of its server.

run_spec.json must agree with the ledger in method, δ, accountant, kind of noise and cost of each round. Method and
aggregator are built from config.toml, and must be those of the specification. Tables are not read. What a run states is
compared with what was derived: it may promise less, never more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from silodp.accounting.accountant import ACCOUNTANTS
from silodp.accounting.events import event_to_dict
from silodp.accounting.guarantee import Guarantee
from silodp.accounting.ledger import Ledger, LedgerHeader
from silodp.accounting.views import Adversary
from silodp.aggregators import RunSpec
from silodp.aggregators.registry import AggregatorRecord
from silodp.aggregators.run_spec import FORMAT, ModelSpec
from silodp.config.run_settings import RunSettings, load_settings
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.parsing import is_format, parse_json, refuse_malformed
from silodp.plugins import refuse_plugins
from silodp.runtime.checkpoint import (
    COMPLETED_ROUNDS_KEY,
    Participation,
    check_checkpoint_file,
    read_fingerprint,
)
from silodp.runtime.guarantees import derive_guarantees
from silodp.runtime.run_files import CONFIG, RUN_SPEC, STATE
from silodp.text import pluralize
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore, MemoryStore, RoundStore, Store

_ALL = "assumptions, claims, and charges of units with privacy budgets"
_TOLERANCE = 1e-6
"""Relative difference of two ε that another machine may cause; a report shows three figures, rounded up."""

JOINED = "realized charges of records with budgets (it is not known here which silos joined which rounds)"


@dataclass(frozen=True)
class Rederived:
    """The guarantees that follow from specification and ledger.

    Attributes:
        guarantees: The guarantees, by adversary; {} where they cannot be derived.
        unchecked: Parts that could not be derived, as text.
    """

    guarantees: Mapping[Adversary, Guarantee]
    unchecked: tuple[str, ...]


@refuse_plugins()
def rederive_guarantees(
    directory: Path, aggregator: AggregatorRecord, ledger: Ledger, header: LedgerHeader
) -> Rederived:
    """Derive the guarantees of a run again.

    Args:
        directory: The directory of the run.
        aggregator: The aggregator, as guarantee.json names it.
        ledger: The ledger of the run, open.
        header: What it says that its charges are about.

    Returns:
        The guarantees, and the parts that cannot be derived.

    Raises:
        SilodpError: config.toml or run_spec.json is of another run, the latter is missing or damaged, or the ledger is
            older than the server store.
    """
    # First: an old copy of a ledger states less than was spent, and agrees with an old copy of everything else.
    _check_age(directory, ledger)
    path = directory / CONFIG
    if not path.exists():
        return Rederived({}, (f"{_ALL} (there is no config.toml)",))
    try:
        settings = load_settings(path)
    except SilodpError as error:
        return Rederived({}, (f"{_ALL} (config.toml cannot be read: {str(error).rstrip('.')})",))
    wrong = _config_mismatch(settings, aggregator, ledger, header)
    if wrong is not None:
        raise _contradicted(path, wrong)
    try:
        spec = _read_spec(directory / RUN_SPEC, settings, ledger)
        wrong = _find_other_cost(spec, ledger)
        if wrong is not None:
            raise _contradicted(path, wrong)
        if ledger.accountant.name not in ACCOUNTANTS:
            name = ledger.accountant.name
            return Rederived(
                {}, (f"{_ALL} (they need the accountant '{name}', which is not part of silodp)",)
            )
        store, unchecked = _read_participation(directory, spec, ledger)
    except OSError as error:
        return Rederived({}, (f"{_ALL} ({error.strerror})",))
    # Of a seeded run the draws are repeated. Of others they are read from the store, or listed as not checked.
    participation = Participation(spec, store, Randomness.from_seed(spec.seed or 0))
    derived = derive_guarantees(spec, ledger.to_counts())
    return Rederived({a: one.to_guarantee(participation.count) for a, one in derived.items()}, unchecked)


def _contradicted(path: Path, how: str) -> SilodpError:
    return SilodpError(
        f"{path} is not the configuration of this run: {how}; restore it.", code="report.contradicted"
    )


def _check_age(directory: Path, ledger: Ledger) -> None:
    """Refuse a ledger that is older than the store of the server or its checkpoint."""
    store = _open_store(directory)
    stored = store.get(COMPLETED_ROUNDS_KEY)
    over = 0 if stored is None else Message.decode(stored).round
    if over > ledger.rounds:
        raise SilodpError(
            f"the files in {directory} are of different rounds: its ledger has {pluralize(ledger.rounds, 'round')}, "
            f"and by the store of the server {over} are complete; restore the newest ledger.",
            code="report.contradicted",
        )
    if (directory / STATE).exists():
        try:
            check_checkpoint_file(directory / STATE, ledger)
        except SilodpError as error:
            raise SilodpError(str(error), code="report.contradicted") from None


def _open_store(directory: Path) -> Store:
    """Return what the server stored; a report may be made elsewhere, where others may read it."""
    folder = directory / "checkpoint" / "server"
    return DirectoryStore(folder, private=False) if folder.exists() else MemoryStore()


def _config_mismatch(
    settings: RunSettings, named: AggregatorRecord, ledger: Ledger, header: LedgerHeader
) -> str | None:
    """Return how a configuration contradicts the ledger, or the aggregator that guarantee.json names."""
    aggregator, config = settings.aggregator, settings.config
    used = ledger.accountant.name
    for name, claimed, known in (
        ("method", repr(settings.method), header.settings),
        ("delta", config.delta * aggregator.delta_share, ledger.delta),
        # An accountant outside silodp is not compared: a report does not run its code, which alone knows its name.
        ("accountant", config.accountant if config.accountant in ACCOUNTANTS else used, used),
        ("seed", "none" if config.seed is None else "set", "none" if header.secret else "set"),
    ):
        if claimed != known:
            return f"by it {name} = {claimed}, and by the ledger {known}"
    if AggregatorRecord.from_aggregator(aggregator) != named:
        return f"by it aggregator = {aggregator}, and by guarantee.json {named.to_dict()}"
    return None


def _read_spec(path: Path, settings: RunSettings, ledger: Ledger) -> RunSpec:
    """Return the specification of the run, with method and aggregator built from the configuration.

    Raises:
        SilodpError: the file is missing or damaged, or the configuration is of another run.
    """
    if not path.exists():
        raise SilodpError(
            f"{path} is missing: restore it from a copy, or resume the run, which writes it again.",
            code="report.missing",
        )
    with refuse_malformed(f"{path} is damaged: restore it from a copy.", code="report.damaged"):
        stored = parse_json(path.read_bytes())
        if not is_format(stored["format"], FORMAT):
            raise ValueError("another format")
        model = ModelSpec(**stored["model"], other_code=bool(stored.get("other_code", False)))
        data, tested = PublicData.from_dict(stored["data"]), bool(stored["tested"])
        spec = settings.assemble_spec(data, model, tested=tested)
        spec = replace(spec, accountant=ledger.accountant, run=ledger.run)
        # Through JSON, as the stored one: it turns tuples into lists. The file has more than the run's identity.
        mine = json.loads(json.dumps(spec.to_dict()))
        theirs = {key: stored[key] for key in mine}
    other = next((key for key in mine if mine[key] != theirs[key]), None)
    checkpoint = path.parent / "checkpoint" / "state.safetensors"
    # The file states the digest of its run, and so does the checkpoint.
    digests = [stored.get("digest"), read_fingerprint(checkpoint) if checkpoint.exists() else spec.digest]
    if other is not None or digests != [spec.digest] * 2:
        what = f"its {other}" if other is not None else "its digest"
        raise SilodpError(
            f"{path} is not the specification of this run: {what} differs from config.toml and the ledger; restore it.",
            code="report.contradicted",
        )
    return spec.calibrate()


def _find_other_cost(spec: RunSpec, ledger: Ledger) -> str | None:
    """Return a round whose charge in the ledger does not follow from the specification for any number of silos."""
    for charge in ledger.history:
        if charge.release:
            continue  # its round is checked
        series, about = charge.series, spec.about(charge.series)
        if series and series not in (one.name for one in spec.charged):
            return f"by the ledger there was an {series} after round {charge.after + 1}, and it has none"
        kept = {name: event_to_dict(event) for name, event in charge.events.items()}
        # How many silos answered is not in the ledger; with fewer of them there is less noise, and a round costs more.
        for survivors in range(len(spec.names), spec.min_silos - 1, -1):
            cost = about.round_events(survivors, charge.round)
            if is_same({name: event_to_dict(event) for name, event in cost.items()}, kept):
                break
        else:
            what = series or "round"
            return f"by the ledger the cost of {what} {charge.round + 1} is not that of its settings"
    return None


def _read_participation(directory: Path, spec: RunSpec, ledger: Ledger) -> tuple[RoundStore, tuple[str, ...]]:
    """Return a copy of what the server stored on participation, so that nothing is drawn there, and what is missing."""
    # Participation draws what it does not find, and stores it. A report must not write into a run's directory.
    copy, kept, over, forgotten = RoundStore(MemoryStore()), _open_store(directory), 0, False
    mark = kept.get(COMPLETED_ROUNDS_KEY)
    if mark is not None:
        over = Message.decode(mark).round
        copy.run.put(COMPLETED_ROUNDS_KEY, mark)
    for round_ in range(over, ledger.rounds):
        # Rounds before `over` are counted in the mark; of later ones the server has kept who was drawn.
        drawn = RoundStore(kept).round(round_).get("clients")
        if drawn is None:
            forgotten = spec.is_secret
        else:
            copy.round(round_).put("clients", drawn)
    matters = spec.data.silo_budgets is not None and spec.method.samples_silos and forgotten
    return copy, (JOINED,) if matters else ()


# --- what a run states, and what was derived -------------------------------------------------------------------------


def find_contradiction(stated: Guarantee, derived: Guarantee, unknown: Collection[str] = ()) -> str | None:
    """Return the first part of a stated guarantee that promises more than the derived one, or differs from it.

    A stated ε may be larger, and more may be assumed or not be covered.

    Args:
        stated: The guarantee of guarantee.json.
        derived: What follows from the ledger and the specification; "persons" for every stated number of records.
        unknown: Entries of `Guarantee.groups` that could not be derived.

    Returns:
        The end of a sentence that begins with "it says"; None where nothing is wrong.
    """
    return (
        _compare_facts(stated, derived)
        or _compare_epsilons(stated, derived)
        or _compare_texts(stated, derived)
        or _compare_groups(stated, derived, unknown)
    )


def is_covered(stated: float, charged: float) -> bool:
    """Return whether a stated ε is at least the charged one, up to rounding."""
    return stated >= charged * (1 - _TOLERANCE)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two JSON-ready values are equal, numbers up to rounding."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    # Only floats may differ: a count or a name that differs by anything is another one. True is no number.
    if isinstance(one, float) and isinstance(other, float | int) and not isinstance(other, bool):
        return math.isclose(one, other, rel_tol=_TOLERANCE)
    return bool(one == other)


def _compare_facts(stated: Guarantee, derived: Guarantee) -> str | None:
    for name in ("method", "unit", "delta", "accountant", "rounds"):
        if getattr(stated, name) != getattr(derived, name):
            by_ledger = getattr(derived, name)
            return f"{name} = {getattr(stated, name)}, and by its ledger and settings it is {by_ledger}"
    if stated.releasable and not derived.releasable:
        return "that the model may be released, and by the ledger its noise follows from a seed"
    if stated.releasable and stated.epsilon is None:
        return "that the model may be released, and gives no guarantee"
    return None


def _compare_epsilons(stated: Guarantee, derived: Guarantee) -> str | None:
    if stated.epsilon is None:
        if derived.reason is not None and stated.reason != derived.reason:
            return (
                f"that there is no guarantee because {stated.reason}, and the ledger says: {derived.reason}"
            )
    elif derived.epsilon is None:
        return f"ε = {stated.epsilon:.6g}, and by the ledger there is no guarantee ({derived.reason})"
    elif not is_covered(stated.epsilon, derived.epsilon):
        return f"ε = {stated.epsilon:.6g}, and the ledger's rounds cost {derived.epsilon:.6g}"
    elif (wrong := _compare_persons(stated, derived)) is not None:
        return wrong
    for name, holds in (
        ("any_dropouts", stated.any_dropouts is None or _covers(stated.any_dropouts, derived.any_dropouts)),
        ("sample_known", is_same(stated.sample_known, derived.sample_known)),
        ("linkage", is_same(stated.linkage, derived.linkage)),
        ("claims", is_same(stated.claims, derived.claims)),
    ):
        if not holds:
            return f"{name} = {getattr(stated, name)}, and it is {getattr(derived, name)}"
    return None


def _compare_persons(stated: Guarantee, derived: Guarantee) -> str | None:
    """Compare ε of persons with several records: without it, readers take the ε of one record for one of persons."""
    spent_by_records = dict(derived.persons)
    missing = spent_by_records.keys() - {records for records, _ in stated.persons}
    if missing:
        return f"no ε of a person with {min(missing)} records, which is larger than that of one record"
    for records, epsilon in stated.persons:
        spent = spent_by_records[records]
        if epsilon is not None and not _covers(epsilon, spent):
            cost = "give no guarantee" if spent is None else f"cost {spent:.6g}"
            return f"ε = {epsilon:.6g} for a person with {records} records, and for them the ledger's rounds {cost}"
    return None


def _covers(stated: float | None, derived: float | None) -> bool:
    """Return whether a stated ε is no smaller than the derived one, or neither exists."""
    return stated == derived or (stated is not None and derived is not None and is_covered(stated, derived))


def _compare_texts(stated: Guarantee, derived: Guarantee) -> str | None:
    # Where nothing is promised, nothing has to be assumed.
    if stated.epsilon is not None:
        for one in derived.assumptions:
            if one not in stated.assumptions:
                return f"nothing of what it assumes: {one.id} ({one.text})"
    for text in derived.not_covered:
        if text not in stated.not_covered:
            return f"nothing of what is not covered: {text}"
    return None


def _compare_groups(stated: Guarantee, derived: Guarantee, unknown: Collection[str]) -> str | None:
    # Where nothing is promised, budgets need not be stated.
    if stated.epsilon is None and not stated.groups:
        return None
    if len(stated.groups) != len(derived.groups):
        return f"{len(stated.groups)} budgets, and there are {len(derived.groups)}"
    for one, other in zip(stated.groups, derived.groups, strict=True):
        for key in sorted((one.keys() | other.keys()) - set(unknown)):
            if not is_same(one.get(key), other.get(key)):
                return f"{key} = {one.get(key)} of the budget {one['budget']:.6g}, and it is {other.get(key)}"
    return None
