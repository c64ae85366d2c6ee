"""The guarantees of a finished run, derived again from its specification, its ledger and the store of its server.

run_spec.json must agree with the ledger in method, δ, accountant, kind of noise and cost of each round. Method and
aggregator are built from config.toml, and must be those of the specification. Tables are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from silodp.accounting.accountant import ACCOUNTANTS
from silodp.accounting.events import event_to_dict
from silodp.accounting.guarantee import Guarantee
from silodp.accounting.ledger import ACCOUNTING, Ledger
from silodp.accounting.views import Adversary
from silodp.aggregators import RunSpec
from silodp.aggregators.registry import AggregatorRecord
from silodp.aggregators.run_spec import ModelSpec
from silodp.config.plugins import refuse_plugins
from silodp.config.resolve import ResolvedRun, resolve
from silodp.config.schema import parse_config
from silodp.config.toml_values import read_toml
from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.mechanisms.noise import Randomness
from silodp.parsing import parse_json, refuse_unsound
from silodp.report.comparison import is_same
from silodp.runtime.checkpoint import COMPLETED_ROUNDS_KEY, Participation, count_charges, read_fingerprint
from silodp.runtime.guarantees import derive_guarantees
from silodp.runtime.run_files import CONFIG, RUN_SPEC
from silodp.text import pluralize
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore, MemoryStore, RoundStore, Store

_ALL = "assumptions, claims, and charges of units with privacy budgets"
EARLIER = (
    "assumptions, and whether each round cost what its settings imply (an earlier version of silodp with other texts "
    "and charges began the run)"
)
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
def rederive_guarantees(directory: Path, aggregator: AggregatorRecord | None, ledger: Ledger) -> Rederived:
    """Derive the guarantees of a run again.

    Args:
        directory: The directory of the run.
        aggregator: The aggregator, as guarantee.json names it.
        ledger: The ledger of the run, open.

    Returns:
        The guarantees, and the parts that cannot be derived.

    Raises:
        SilodpError: config.toml or run_spec.json is of another run, or the ledger is older than the server store.
    """
    _check_age(directory, ledger)
    path = directory / CONFIG
    if not path.exists():
        return Rederived({}, (f"{_ALL} (there is no config.toml)",))
    try:
        resolved = _load_config(path)
    except SilodpError as error:
        return Rederived({}, (f"{_ALL} (config.toml cannot be read: {str(error).rstrip('.')})",))
    wrong = _config_mismatch(resolved, aggregator, ledger)
    if wrong is not None:
        raise _contradicted(path, wrong)
    header = ledger.subject
    if not (directory / RUN_SPEC).exists() or (header is not None and header.accounting < ACCOUNTING):
        # The rules of its version may differ from these; ε is compared with the ledger all the same.
        return Rederived({}, (EARLIER,))
    try:
        spec = _read_spec(directory / RUN_SPEC, resolved, ledger)
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
    participation = Participation(spec, store, Randomness.from_seed(spec.seed or 0))
    derived = derive_guarantees(spec, ledger.to_counts())
    return Rederived({a: one.to_guarantee(participation.count) for a, one in derived.items()}, unchecked)


def _contradicted(path: Path, how: str) -> SilodpError:
    return SilodpError(
        f"{path} is not the configuration of this run: {how}; restore it.", code="report.contradicted"
    )


def _load_config(path: Path) -> ResolvedRun:
    """Load config.toml without `aggregation.device`, which earlier versions had and no result depends on."""
    values = read_toml(path)
    if isinstance(values.get("aggregation"), dict):
        values["aggregation"].pop("device", None)
    return resolve(parse_config({"name": path.stem, **values}, path.parent))


def _check_age(directory: Path, ledger: Ledger) -> None:
    """Refuse a ledger that lacks rounds, or charges, which the store of the server lists: it is an old copy."""
    folder = directory / "checkpoint" / "server"
    store: Store = DirectoryStore(folder, private=False) if folder.exists() else MemoryStore()
    stored = store.get(COMPLETED_ROUNDS_KEY)
    over = 0 if stored is None else Message.decode(stored).round
    if over > ledger.rounds:
        raise SilodpError(
            f"the files in {directory} are of different rounds: its ledger has {pluralize(ledger.rounds, 'round')}, "
            f"and by the store of the server {over} are complete; restore the newest ledger.",
            code="report.contradicted",
        )
    kept, found = count_charges(store), len(ledger.history)
    if kept > found:
        raise SilodpError(
            f"the files in {directory} are of different moments: its ledger has {pluralize(found, 'charge')}, and the "
            f"store of the server lists {kept}; restore the newest ledger.",
            code="report.contradicted",
        )


def _config_mismatch(resolved: ResolvedRun, named: AggregatorRecord | None, ledger: Ledger) -> str | None:
    """Return how a configuration contradicts the ledger, or the aggregator that guarantee.json names."""
    header, aggregator, config = ledger.subject, resolved.aggregator, resolved.config
    for name, claimed, known in (
        ("method", repr(resolved.method), header and header.settings),
        ("delta", config.delta * aggregator.delta_share, ledger.delta),
        ("accountant", _accountant_name(config.accountant) or ledger.accountant.name, ledger.accountant.name),
        ("seed", "none" if config.seed is None else "set", "none" if header and header.secret else "set"),
    ):
        if claimed != known:
            return f"by it {name} = {claimed}, and by the ledger {known}"
    if AggregatorRecord.from_aggregator(aggregator) != named:
        stored = None if named is None else named.to_dict()
        return f"by it aggregator = {aggregator}, and by guarantee.json {stored}"
    return None


def _accountant_name(name: str | None) -> str | None:
    """Return the accountant of config.toml; None where it names none, or one whose code a report does not run."""
    return name if name in ACCOUNTANTS else None


def _read_spec(path: Path, resolved: ResolvedRun, ledger: Ledger) -> RunSpec:
    """Return the specification of the run, with method and aggregator built from the configuration.

    Raises:
        SilodpError: the file is damaged, or the configuration is of another run.
    """
    with refuse_unsound(f"{path} is damaged: restore it from a copy.", code="report.damaged"):
        stored = parse_json(path.read_bytes())
        model = ModelSpec(**stored["model"], other_code=bool(stored.get("other_code", False)))
        data, tested = PublicData.from_dict(stored["data"]), bool(stored["tested"])
        spec = resolved.assemble_spec(data, model, tested=tested)
        spec = replace(spec, accountant=ledger.accountant, run=ledger.run)
        mine = json.loads(json.dumps(spec.to_dict()))
        theirs = {key: stored[key] for key in mine}
    other = next((key for key in mine if mine[key] != theirs[key]), None)
    checkpoint = path.parent / "checkpoint" / "state.safetensors"
    digests = {stored.get("digest"), read_fingerprint(checkpoint) if checkpoint.exists() else spec.digest}
    if other is not None or digests != {spec.digest}:
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
            continue  # its round or evaluation is checked
        about, number = spec, charge.round
        if charge.evaluation is not None:
            if spec.charged_evaluation is None:
                return (
                    f"by the ledger there was an evaluation after round {charge.round + 1}, and it has none"
                )
            about, number = spec.charged_evaluation, charge.evaluation
        kept = {name: event_to_dict(event) for name, event in charge.events.items()}
        for survivors in range(len(spec.names), spec.min_silos - 1, -1):
            cost = about.round_events(survivors, number)
            if is_same({name: event_to_dict(event) for name, event in cost.items()}, kept):
                break
        else:
            what = "round" if about is spec else "evaluation"
            return f"by the ledger the cost of {what} {number + 1} is not that of its settings"
    return None


def _read_participation(directory: Path, spec: RunSpec, ledger: Ledger) -> tuple[RoundStore, tuple[str, ...]]:
    """Return a copy of what the server stored on participation, so that nothing is drawn there, and what is missing."""
    copy, folder, over, forgotten = RoundStore(MemoryStore()), directory / "checkpoint" / "server", 0, False
    kept: Store = DirectoryStore(folder, private=False) if folder.exists() else MemoryStore()
    mark = kept.get(COMPLETED_ROUNDS_KEY)
    if mark is not None:
        over = Message.decode(mark).round
        copy.run.put(COMPLETED_ROUNDS_KEY, mark)
    for round_ in range(over, ledger.rounds):
        drawn = RoundStore(kept).round(round_).get("clients")
        if drawn is None:
            forgotten = spec.is_secret
        else:
            copy.round(round_).put("clients", drawn)
    matters = spec.data.silo_budgets is not None and spec.method.samples_silos and forgotten
    return copy, (JOINED,) if matters else ()
