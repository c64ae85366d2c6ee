"""What a guarantee says besides ε, told again from the run's configuration and what its directory keeps.

config.toml is believed as far as the ledger bears it out: method, δ, accountant, kind of noise, and what each round
cost. Tables are not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors.numpy import load

from silodp.accounting.events import event_to_dict
from silodp.accounting.guarantee import Adversary, Guarantee
from silodp.accounting.ledger import ACCOUNTING, Ledger
from silodp.aggregators import AggregatorRecord
from silodp.aggregators.base import Setting, round_events
from silodp.config.budgets import budget_unit
from silodp.config.public_spec import ASSUMED_USERS, declared_users, outline, setting_of
from silodp.config.schema import RunConfig, load_config
from silodp.data.federation import Federation, SiloData
from silodp.errors import SilodpError, counted
from silodp.mechanisms.noise import Randomness
from silodp.runtime.guarantees import build_guarantees, delta_warning
from silodp.runtime.server import COMPLETED_ROUNDS_KEY, Server
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore, MemoryStore, RoundStore, Store, unseal
from silodp.wire.transport import Channel

CONFIG = "config.toml"
_ALL = "assumptions, claims, and what units with budgets of their own were charged"
DATA = "assumptions that came with the data tables (only they say them)"
EARLIER = (
    "assumptions, and whether each round cost what its settings say (an earlier version of silodp, which worded and "
    "charged otherwise, began the run)"
)
USERS = "whether δ is below 1/U (how many persons there are is not known here)"
COLUMN = "which budgets there are and how many records have them (only the tables say it)"
JOINED = "what was realized of records' budgets (which silos joined which rounds is not known here)"

_LAST_DIGITS = 1e-6
"""Relative: as much as another machine's arithmetic may change."""
_BOUNDS = ("planned", "realized")
_OF_ALL_UNITS = ("units", "from", "least", "overspent")
"""What an entry on a budget says that does not follow from that budget alone."""


@dataclass(frozen=True)
class Rederived:
    """The guarantees as configuration and ledger make them, and what of them nothing here can make again."""

    guarantees: Mapping[Adversary, Guarantee]
    unchecked: tuple[str, ...]
    earlier: bool = False
    """Whether the run was begun by the first version, whose rules and words differ."""

    def contradiction(self, said: Guarantee) -> str | None:
        """What a guarantee leaves out or says otherwise; more may be assumed than must be."""
        if said.adversary not in self.guarantees:
            return None
        again = self.guarantees[said.adversary]
        if said.epsilon is not None and EARLIER not in self.unchecked:
            for text in again.assumptions:
                if text not in said.assumptions:
                    return f"nothing of what it assumes: {text}"
        if said.any_dropouts is not None:
            least = None if again.any_dropouts is None else again.any_dropouts * (1 - _LAST_DIGITS)
            if least is None or not said.any_dropouts >= least:
                return f"any_dropouts = {said.any_dropouts}, and it is {again.any_dropouts}"
        if EARLIER not in self.unchecked and not same(said.claims, again.claims):
            return f"claims = {_list(said.claims)}, and they are {_list(again.claims)}"
        return self._about_groups(said, again)

    def _about_groups(self, said: Guarantee, again: Guarantee) -> str | None:
        if said.epsilon is None and not said.groups:
            return None  # nothing is claimed
        if COLUMN in self.unchecked and not said.groups:
            return "nothing of the budgets that records have"
        if len(said.groups) != len(again.groups):
            return f"{len(said.groups)} budgets, and there are {len(again.groups)}"
        if EARLIER in self.unchecked:
            return None
        passed = {*_OF_ALL_UNITS} if COLUMN in self.unchecked else set()
        passed |= {"realized"} if JOINED in self.unchecked else set()
        for one, other in zip(said.groups, again.groups, strict=True):
            for key in sorted((one.keys() | other.keys()) - passed):
                if self.earlier and key in _BOUNDS and (one.get(key) or 0) >= (other.get(key) or math.inf):
                    continue  # its accountant rounded up further
                if not same(one.get(key), other.get(key)):
                    return f"{key} = {one.get(key)} of the budget {one['budget']:.6g}, and it is {other.get(key)}"
        return None


def rederive_guarantees(
    directory: Path, said: Sequence[Guarantee], aggregator: AggregatorRecord | None, ledger: Ledger
) -> Rederived:
    """What a run's directory makes known once more; `aggregator` as guarantee.json names it.

    Whether an earlier version began the run, which worded and charged otherwise, the ledger says.

    Raises:
        SilodpError: config.toml is not this run's, or the ledger is older than the server's store.
    """
    _check_age(directory, ledger)
    path = directory / CONFIG
    if not path.exists():
        return Rederived({}, (f"{_ALL} (there is no config.toml)",))
    try:
        config = load_config(path)
    except SilodpError as error:
        return Rederived({}, (f"{_ALL} (config.toml cannot be read: {str(error).rstrip('.')})",))
    wrong = _config_mismatch(config, aggregator, ledger)
    if wrong is None:
        known = _RunFiles(directory, config, said, ledger)
        try:
            setting = known.setting()
            wrong = known.other_costs(setting)
            again = known.retold(setting)
            if (
                again.earlier
            ):  # by its own rules the run may be right; ε is compared with the ledger all the same
                wrong, again = None, replace(again, unchecked=(EARLIER, *again.unchecked))
        except SilodpError as error:
            return Rederived({}, (f"{_ALL} (they cannot be told again: {str(error).rstrip('.')})",))
    if wrong is not None:
        raise SilodpError(
            f"{path} is not the configuration of this run: {wrong}; restore it.", code="report.contradicted"
        )
    return again


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
        ("accountant", config.accountant or ledger.accountant, ledger.accountant),
        ("seed", "none" if config.seed is None else "set", "none" if kept and kept.secret else "set"),
    ):
        if claimed != known:
            return f"by it {name} = {claimed}, and by the ledger {known}"
    if AggregatorRecord.from_aggregator(aggregator) != named:
        stored = None if named is None else named.to_dict()
        return f"by it aggregator = {aggregator}, and by guarantee.json {stored}"
    return None


class _RunFiles:
    """A run as its directory shows it: settings, how many records each silo has, who joined which rounds."""

    def __init__(self, directory: Path, config: RunConfig, said: Sequence[Guarantee], ledger: Ledger) -> None:
        self._config, self._ledger = config, ledger
        self._method, self._aggregator = config.method(), config.aggregator()
        self._checkpoint = directory / "checkpoint"
        self._groups = next((guarantee.groups for guarantee in said if guarantee.groups), ())
        self._unchecked = [DATA]

    def setting(self) -> Setting:
        """What all parties knew.

        Raises:
            SilodpError: it cannot be known from this directory.
        """
        path = self._checkpoint / "state.safetensors"
        if not path.exists():
            raise SilodpError("checkpoint/state.safetensors is missing", code="report.missing")
        # d by what was trained: to make the model may take its maker's code.
        size = len(load(unseal(path.read_bytes(), f"checkpoint {path}"))["params"])
        return setting_of(self._federation, size, self._method, self._aggregator, self._config.delta)

    def other_costs(self, setting: Setting) -> str | None:
        """A round that the ledger charges otherwise than these settings do, however many silos answered it."""
        if USERS in self._unchecked and self._method.unit == "user":
            return None  # how much room sums need depends on U
        for charge in self._ledger.history:
            if charge.release:
                continue  # of the same round, with the same settings
            kept = {name: event_to_dict(event) for name, event in charge.events.items()}
            for survivors in range(setting.population.silos, setting.population.m - 1, -1):
                cost = round_events(self._aggregator, setting, survivors, charge.round)
                if same({name: event_to_dict(event) for name, event in cost.items()}, kept):
                    break
            else:
                return f"by the ledger round {charge.round + 1} cost something else than by its settings"
        return None

    def retold(self, setting: Setting) -> Rederived:
        """The guarantees, made once more."""
        secret, delta = self._config.seed is None, self._config.delta
        server = Server(
            setting,
            cast(Channel, None),  # nobody is asked
            self._aggregator,
            self._ledger,
            self._joined(setting),
            Randomness.from_seed(self._config.seed or 0),
        )
        found = build_guarantees(self._federation, setting.method, server, self._ledger, delta, secret)
        unsure = delta_warning(delta, self._federation.users) if USERS in self._unchecked else ()
        for name, guarantee in found.items():
            sure = tuple(text for text in guarantee.assumptions if text not in unsure)
            found[name] = replace(guarantee, assumptions=sure)
        kept = self._ledger.subject
        return Rederived(found, tuple(self._unchecked), kept is not None and kept.accounting < ACCOUNTING)

    @cached_property
    def _federation(self) -> Federation:
        """Without records; with everybody's budgets, where the directory shows them, else with those that are told."""
        kept = [self._set_up(place) for place in range(self._config.silos)]
        sizes = None if None in kept else [len(arrays["admitted"]) for arrays in kept if arrays is not None]
        users = self._users(sizes, kept[0] or {})
        if users is None:
            self._unchecked.append(USERS)
        federation, _ = outline(self._config, users or ASSUMED_USERS)
        if budget_unit(self._method) != "record":
            return federation
        own = self._config.preferences()
        if own is not None and sizes is not None:
            silos = [_with_records(silo, None, n) for silo, n in zip(federation.silos, sizes, strict=True)]
            return own.on(replace(federation, silos=tuple(silos)))
        self._unchecked.append(COLUMN)
        if not self._groups:
            return federation
        told = np.array([float(group["budget"]) for group in self._groups])
        budgets = [told, *[np.empty(0)] * (len(federation.silos) - 1)]
        silos = [
            _with_records(silo, own, len(own)) for silo, own in zip(federation.silos, budgets, strict=True)
        ]
        return replace(federation, silos=tuple(silos))

    def _users(self, sizes: Sequence[int] | None, kept: Mapping[str, np.ndarray]) -> int | None:
        """U, by the configuration, else by what a silo was given; None where it is not known."""
        if "allotment" in kept:
            return len(kept["allotment"])
        with suppress(SilodpError):  # the list of persons may be elsewhere
            declared = declared_users(self._config)
            if declared is not None:
                return declared
        if self._config.source != "tables":
            return None if sizes is None else sum(sizes)  # every record is a person of its own
        if self._method.unit == "user" and self._groups:
            return sum(int(group["units"]) for group in self._groups)  # each is in one of them
        return None

    def _set_up(self, place: int) -> Mapping[str, np.ndarray] | None:
        """What a silo has kept of its set-up."""
        folder = self._checkpoint / "silos" / f"{place:03}"
        kept = (
            DirectoryStore(folder, private=False).get(f"{self._ledger.run}/setup")
            if folder.exists()
            else None
        )
        return None if kept is None else Message.decode(kept).arrays

    def _joined(self, setting: Setting) -> RoundStore:
        """The server's memory of which silos were drawn for each round: a copy, so that nothing new is drawn there."""
        copy, folder, over, forgotten = RoundStore(MemoryStore()), self._checkpoint / "server", 0, False
        kept: Store = DirectoryStore(folder, private=False) if folder.exists() else MemoryStore()
        mark = kept.get(COMPLETED_ROUNDS_KEY)
        if mark is not None:
            over = Message.decode(mark).round
            copy.run.put(COMPLETED_ROUNDS_KEY, mark)
        for round_ in range(over, self._ledger.rounds):
            drawn = RoundStore(kept).round(round_).get("clients")
            drawn = kept.get(f"clients/{round_}") if drawn is None else drawn  # checkpoints of format 3
            if drawn is None:
                forgotten = self._config.seed is None
            else:
                copy.round(round_).put("clients", drawn)
        drawn_at_all = self._method.sample_silos(setting.population, np.random.default_rng(0)) is not None
        if self._groups and drawn_at_all and (COLUMN in self._unchecked or forgotten):
            self._unchecked.append(JOINED)
        return copy


def _with_records(silo: SiloData, budget: np.ndarray | None, size: int) -> SiloData:
    """So many records, of zeros that take no room."""
    x = np.broadcast_to(np.float32(0), (size, *silo.x.shape[1:]))
    y = np.zeros((size, *silo.y.shape[1:]), silo.y.dtype)
    return SiloData(silo.name, x, y, np.zeros(size, np.int64), budget)


def _list(claims: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"ε = {claim['epsilon']:.6g} ({claim['why']})" for claim in claims) or "none"
