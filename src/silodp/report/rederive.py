"""What a guarantee says besides ε, derived again from the run's specification and what its directory keeps.

run_spec.json is believed as far as the ledger bears it out: method, δ, accountant, kind of noise, and what each round
cost. Method and aggregator are built from config.toml, and must be those of the specification. Tables are not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silodp.accounting.accountant import ACCOUNTANTS
from silodp.accounting.events import event_to_dict
from silodp.accounting.guarantee import Adversary, Guarantee
from silodp.accounting.ledger import ACCOUNTING, Ledger
from silodp.aggregators import RunSpec
from silodp.aggregators.registry import AggregatorRecord
from silodp.aggregators.run_spec import ModelSpec
from silodp.config.plugins import refuse_plugins
from silodp.config.schema import RunConfig, parse_config
from silodp.config.toml_values import read_toml
from silodp.data.public import PublicData
from silodp.errors import SilodpError, counted
from silodp.mechanisms.noise import Randomness
from silodp.runtime.checkpoint import read_fingerprint
from silodp.runtime.guarantees import build_guarantees
from silodp.runtime.participation import COMPLETED_ROUNDS_KEY, Participation
from silodp.runtime.run_directory import RUN_SPEC
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore, MemoryStore, RoundStore, Store

CONFIG = "config.toml"
_ALL = "assumptions, claims, and what units with privacy budgets were charged"
EARLIER = (
    "assumptions, and whether each round cost what its settings say (an earlier version of silodp, which worded and "
    "charged otherwise, began the run)"
)
JOINED = "what was realized of records' budgets (which silos joined which rounds is not known here)"

_LAST_DIGITS = 1e-6
"""Relative: as much as another machine's arithmetic may change."""


@dataclass(frozen=True)
class Rederived:
    """The guarantees that specification and ledger imply.

    Attributes:
        guarantees: by adversary; {} where they cannot be derived.
        unchecked: what could not be derived, for people.
    """

    guarantees: Mapping[Adversary, Guarantee]
    unchecked: tuple[str, ...]

    def contradiction(self, said: Guarantee) -> str | None:
        """Return what a guarantee leaves out or says otherwise; more may be assumed than must be."""
        if said.adversary not in self.guarantees:
            return None
        again = self.guarantees[said.adversary]
        if said.epsilon is not None:
            for text in again.assumptions:
                if text not in said.assumptions:
                    return f"nothing of what it assumes: {text}"
        if said.any_dropouts is not None:
            least = None if again.any_dropouts is None else again.any_dropouts * (1 - _LAST_DIGITS)
            if least is None or not said.any_dropouts >= least:
                return f"any_dropouts = {said.any_dropouts}, and it is {again.any_dropouts}"
        if not same(said.claims, again.claims):
            return f"claims = {_list(said.claims)}, and they are {_list(again.claims)}"
        return self._about_groups(said, again)

    def _about_groups(self, said: Guarantee, again: Guarantee) -> str | None:
        if said.epsilon is None and not said.groups:
            return None  # nothing is claimed
        if len(said.groups) != len(again.groups):
            return f"{len(said.groups)} budgets, and there are {len(again.groups)}"
        passed = {"realized"} if JOINED in self.unchecked else set()
        for one, other in zip(said.groups, again.groups, strict=True):
            for key in sorted((one.keys() | other.keys()) - passed):
                if not same(one.get(key), other.get(key)):
                    return f"{key} = {one.get(key)} of the budget {one['budget']:.6g}, and it is {other.get(key)}"
        return None


@refuse_plugins()
def rederive_guarantees(directory: Path, aggregator: AggregatorRecord | None, ledger: Ledger) -> Rederived:
    """Derive the guarantees of a run again.

    Args:
        directory: of the run.
        aggregator: as guarantee.json names it.
        ledger: of the run.

    Raises:
        SilodpError: config.toml or run_spec.json is not this run's, or the ledger is older than the server's store.
    """
    _check_age(directory, ledger)
    path = directory / CONFIG
    if not path.exists():
        return Rederived({}, (f"{_ALL} (there is no config.toml)",))
    try:
        config = _load_config(path)
    except SilodpError as error:
        return Rederived({}, (f"{_ALL} (config.toml cannot be read: {str(error).rstrip('.')})",))
    wrong = _config_mismatch(config, aggregator, ledger)
    if wrong is not None:
        raise _contradicted(path, wrong)
    header = ledger.subject
    if not (directory / RUN_SPEC).exists() or (header is not None and header.accounting < ACCOUNTING):
        # By its own rules such a run may be right; ε is compared with the ledger all the same.
        return Rederived({}, (EARLIER,))
    try:
        spec = _read_spec(directory / RUN_SPEC, config, ledger)
        wrong = _other_cost(spec, ledger)
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
    return Rederived(build_guarantees(spec, ledger, participation.count), unchecked)


def _contradicted(path: Path, how: str) -> SilodpError:
    return SilodpError(
        f"{path} is not the configuration of this run: {how}; restore it.", code="report.contradicted"
    )


def _load_config(path: Path) -> RunConfig:
    """Load a run's config.toml without `aggregation.device`, which earlier versions had and no result depends on."""
    values = read_toml(path)
    if isinstance(values.get("aggregation"), dict):
        values["aggregation"].pop("device", None)
    return parse_config({"name": path.stem, **values}, path.parent)


def _check_age(directory: Path, ledger: Ledger) -> None:
    """Rounds that are over were charged: a ledger without them was set back."""
    folder = directory / "checkpoint" / "server"
    mark = DirectoryStore(folder, private=False).get(COMPLETED_ROUNDS_KEY) if folder.exists() else None
    over = 0 if mark is None else Message.decode(mark).round
    if over > ledger.rounds:
        raise SilodpError(
            f"{directory} is not of one moment: its ledger has {counted(ledger.rounds, 'round')}, and the server's "
            f"store says that {over} are over; restore the newest ledger.",
            code="report.contradicted",
        )


def same(one: Any, other: Any) -> bool:
    """Whether two JSON-ready values are alike, numbers up to their last digits."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float | int) and not isinstance(other, bool):
        return math.isclose(one, other, rel_tol=_LAST_DIGITS)
    return bool(one == other)


def _config_mismatch(config: RunConfig, named: AggregatorRecord | None, ledger: Ledger) -> str | None:
    """How a configuration contradicts the ledger, or the aggregator that guarantee.json names."""
    kept, aggregator = ledger.subject, config.aggregator()
    for name, claimed, known in (
        ("method", repr(config.method()), kept and kept.settings),
        ("delta", config.delta * aggregator.delta_share, ledger.delta),
        ("accountant", _accountant_name(config) or ledger.accountant.name, ledger.accountant.name),
        ("seed", "none" if config.seed is None else "set", "none" if kept and kept.secret else "set"),
    ):
        if claimed != known:
            return f"by it {name} = {claimed}, and by the ledger {known}"
    if AggregatorRecord.from_aggregator(aggregator) != named:
        stored = None if named is None else named.to_dict()
        return f"by it aggregator = {aggregator}, and by guarantee.json {stored}"
    return None


def _accountant_name(config: RunConfig) -> str | None:
    """None where config.toml names none, or one of a user's own, whose code a report does not run."""
    return config.accountant if config.accountant in ACCOUNTANTS else None


def _read_spec(path: Path, config: RunConfig, ledger: Ledger) -> RunSpec:
    """Return the run's specification, its method and aggregator built from the configuration.

    Raises:
        SilodpError: the file is damaged, or the configuration is another run's.
    """
    try:
        stored = json.loads(path.read_bytes())
        spec = RunSpec(
            PublicData.from_dict(stored["data"]),
            ModelSpec(**stored["model"]),
            config.method(),
            config.aggregator(),
            int(stored["min_silos"]),
            rounds=config.rounds,
            delta=config.delta,
            accountant=ledger.accountant,
            seed=config.seed,
            tested=bool(stored["tested"]),
            run=ledger.run,
        )
        mine = json.loads(json.dumps(spec.to_dict()))
        theirs = {key: stored[key] for key in mine}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SilodpError(f"{path} is damaged: restore it from a copy.", code="report.damaged") from None
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


def _other_cost(spec: RunSpec, ledger: Ledger) -> str | None:
    """Name a round that the ledger charges otherwise than the specification does, however many silos answered it."""
    for charge in ledger.history:
        if charge.release:
            continue  # of the same round, with the same settings
        kept = {name: event_to_dict(event) for name, event in charge.events.items()}
        for survivors in range(len(spec.names), spec.min_silos - 1, -1):
            cost = spec.round_events(survivors, charge.round)
            if same({name: event_to_dict(event) for name, event in cost.items()}, kept):
                break
        else:
            return f"by the ledger round {charge.round + 1} cost something else than by its settings"
    return None


def _read_participation(directory: Path, spec: RunSpec, ledger: Ledger) -> tuple[RoundStore, tuple[str, ...]]:
    """Return a copy of the server's memory of which silos took part (nothing is drawn there), and what it lacks."""
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


def _list(claims: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"ε = {claim['epsilon']:.6g} ({claim['why']})" for claim in claims) or "none"
