"""What all frameworks share: reading their settings, and bounds for a client, a record and a person.

Two worlds are compared, as everywhere in silodp: with a unit's records, and with the unit emptied. An emptied client
stays a client, and its update is 0; so a clipped update moves by at most the clip C. If one record or one person in a
client is emptied, the client's other records remain, and its clipped update moves from one point of the ball of radius
C to another: by at most 2C (docs/privacy.md, section 4, N).
"""

from __future__ import annotations

import contextlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from silodp.accounting.accountant import EventCount, choose_accountant
from silodp.accounting.charges import PERSONS_RECORDS, Cost, compute_cost
from silodp.accounting.events import Gaussian, RevealedSample
from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.pld import compute_gaussian_epsilon
from silodp.config.toml_values import TomlTable, apply_override
from silodp.errors import SilodpError, lookup
from silodp.parsing import parse_json, parse_toml
from silodp.settings import Delta, Positive, Probability, Whole, check_value
from silodp.text import pluralize, shorten, suggest_name

DELTA = 1e-5

SERVER, RELEASED = "the server", "whoever sees the models"
CLIENT, RECORD = "a client", "a record"
RECORDS = {RECORD: 1, **{f"a person with {records} records": records for records in PERSONS_RECORDS}}
"""Units that have records in one client or in several: name → number of records."""
UNITS = {CLIENT: 0, **RECORDS}
"""All units; 0 stands for a client that is emptied."""


BUFFERS = "buffers that training changes, such as the statistics of BatchNorm, which are sent without clip and noise"
"""Entries that clipped and noisy gradients do not cover."""


@dataclass(frozen=True)
class Bound:
    """ε for one unit against one adversary.

    Attributes:
        adversary: `SERVER` or `RELEASED`. A bound against the server holds against everybody who sees less.
        unit: What is protected: `CLIENT`, `RECORD` or a person.
        epsilon: An upper bound of ε; None where there is no guarantee.
        reason: Why there is no guarantee; None where there is one.
    """

    adversary: str
    unit: str
    epsilon: float | None
    reason: str | None = None


@dataclass(frozen=True)
class Finding:
    """The bounds that hold under the settings of a framework, beside the ε that the framework states.

    Attributes:
        framework: The name of the framework.
        mechanism: The class or filter that adds the noise, with its settings.
        delta: The δ of all bounds.
        rounds: The number of rounds.
        bounds: A bound for each adversary and unit.
        stated: The ε that the framework itself computes, by its own rule; None where it computes none.
        stated_for: The unit for which that ε is stated, and the rule.
        differences: The reasons why it is not one of the bounds, one clause each.
        assumptions: The assumptions of the bounds, one clause each.
        unread: Settings of the files that have no effect on the bounds, as far as is known here.
    """

    framework: str
    mechanism: str
    delta: float
    rounds: int
    bounds: tuple[Bound, ...]
    stated: float | None = None
    stated_for: str = ""
    differences: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        return asdict(self)

    def format_lines(self) -> list[str]:
        """Return the finding as lines of text."""
        rounds = pluralize(self.rounds, "round")
        lines = [f"{self.framework}: {self.mechanism}", f"after {rounds}, at δ = {self.delta:g}:"]
        for adversary in dict.fromkeys(bound.adversary for bound in self.bounds):
            lines.append(f"  against {adversary}")
            mine = [bound for bound in self.bounds if bound.adversary == adversary]
            reasons = {bound.reason for bound in mine}
            if len(reasons) == 1 and None not in reasons:
                lines.append(f"    no guarantee: {reasons.pop()}")
                continue
            for bound in mine:
                text = (
                    f"no guarantee: {bound.reason}"
                    if bound.epsilon is None
                    else f"ε = {format_epsilon(bound.epsilon)}"
                )
                lines.append(f"    {bound.unit}: {text}")
        if self.stated is not None:
            # Quoted, and not rounded up as a bound is.
            lines.append(f"  stated: ε = {self.stated:.5g} {self.stated_for}".rstrip())
        why = "note" if self.stated is None else "why it differs"
        lines += [f"    {why}: {text}" for text in self.differences]
        lines += [f"  assuming that {text}" for text in self.assumptions]
        return lines + ([f"  not read: {', '.join(self.unread)}"] if self.unread else [])


_Whole = Annotated[int, Whole(limit=2**63)]


class FrameworkSettings:
    """Settings of a framework by name.

    Args:
        framework: name, for messages.
        values: the settings by name, as they were read.
        typed: names that were given as KEY=VALUE.

    Attributes:
        asked: names that were looked for, whether they are set or not.
    """

    def __init__(self, framework: str, values: Mapping[str, Any], typed: Iterable[str] = ()) -> None:
        self.framework, self.values, self.typed = framework, values, tuple(typed)
        self.asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self.asked.add(name)
        return name in self.values

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a number above 0 under the first of the names that is set.

        Raises:
            SilodpError: it is missing and has no default, or is no such number.
        """
        return float(self._read(names, Positive, default, "a number above 0"))

    def whole(self, *names: str, default: int | None = None) -> int:
        """Return a whole number, 1 or more; errors as of `number`."""
        return int(self._read(names, _Whole, default, "a whole number, 1 or more"))

    def share(self, *names: str, default: float | None = None) -> float:
        """Return a number above 0 and at most 1; errors as of `number`."""
        return float(self._read(names, Probability, default, "a number above 0 and at most 1"))

    def flag(self, *names: str, default: bool) -> bool:
        """Return whether a setting is true; errors as of `number`."""
        return bool(self._read(names, bool, default, "true or false"))

    def choice(self, name: str, known: Iterable[str], default: str | None = None) -> str:
        """Return a text that is one of some known ones; errors as of `number`."""
        known = tuple(known)
        if name not in self:
            return str(self._default(name, default, "|".join(known)))
        return lookup(str(self.values[name]), {each: each for each in known}, name)

    def _default(self, name: str, default: Any, values: str) -> Any:
        if default is None:
            raise SilodpError(
                f"{name} is missing: name it, for example 'silodp epsilon --framework {self.framework} "
                f"{name}={values}'.",
                code="argument.missing",
                field=name,
            )
        return default

    def _read(self, names: Sequence[str], declared: Any, default: Any, needs: str) -> Any:
        """Return the value under the first of the names that is set, checked against an annotation."""
        name = self._find(names)
        if name not in self:
            return self._default(name, default, "...")
        value = self.values[name]
        # YAML and JSON write 100.0 for a number of rounds, too.
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        try:
            check_value(name, value, declared)
        except SilodpError:
            raise self._refuse(names, needs) from None
        return value

    def _find(self, names: Sequence[str]) -> str:
        """Return the first of the names that is set; the first one where none is.

        Raises:
            SilodpError: two of them are set, and differ.
        """
        found = [name for name in names if name in self]
        found = [name for name in found if name in self.typed] or found  # KEY=VALUE replaces a file
        for other in found[1:]:
            if self.values[other] != self.values[found[0]]:
                raise SilodpError(
                    f"{found[0]} = {self.values[found[0]]} and {other} = {self.values[other]} mean the same, and "
                    "differ: leave one of them out.",
                    code="argument.conflict",
                    field=other,
                )
        return found[0] if found else names[0]

    def list_unread(self, without_effect: Iterable[str]) -> tuple[str, ...]:
        """Return the names of a file that nothing has looked for.

        Args:
            without_effect: further names that the framework has, and that change no bound.

        Raises:
            SilodpError: such a name was given as KEY=VALUE: a setting that is left out in silence, for example the
                number of epochs under another name, would make ε too small.
        """
        # Names that were looked for and not set are known, too: they appear in the hint.
        known = {*self.asked, *without_effect}
        for name in self.typed:
            if name not in known:
                hint = suggest_name(name, sorted(known)) or f"known here: {', '.join(sorted(known))}"
                raise SilodpError(
                    f"'{name}' has no meaning beside these settings of {self.framework} ({hint}): correct it, or leave "
                    "it out.",
                    code="argument.value",
                    field=name,
                )
        return tuple(name for name in self.values if name not in known)

    def _refuse(self, names: Sequence[str], needs: str) -> SilodpError:
        name = self._find(names)
        value = self.values.get(name)
        given, several = shorten(str(value)), ""
        if isinstance(value, list):
            given = shorten(value)
            several = "; where clients differ, run the command once for each client, and take the largest ε"
        return SilodpError(
            f"{name} = {given} is not usable: set {needs}{several}.",
            code="argument.value",
            field=name,
        )

    def delta(self, given: float | None, *names: str) -> float:
        """Return the given δ, else that of the settings, else 1e-5.

        Raises:
            SilodpError: it is out of range.
        """
        found = self.number(*names, default=DELTA) if given is None else given
        check_value("delta", found, Delta)
        return found


class Framework(ABC):
    """A framework whose settings can be checked."""

    name: ClassVar[str]
    """In the option --framework."""
    files: ClassVar[str]
    """Which of its files are read, for messages."""
    without_effect: ClassVar[tuple[str, ...]] = ()
    """Names that may be given, and that change no bound."""

    def pick(self, content: Any) -> TomlTable:
        """Return the settings by name of a file, as read from TOML, JSON or YAML; by default all of the top level."""
        return dict(content) if isinstance(content, dict) else {}

    @abstractmethod
    def check(self, settings: FrameworkSettings, delta: float | None) -> Finding:
        """Return the bounds that hold, and the ε that the framework states.

        Args:
            settings: the settings, as they were read.
            delta: δ; None: that of the settings, else 1e-5.

        Raises:
            SilodpError: a setting is missing or out of range.
        """

    def check_given(self, given: Sequence[str], delta: float | None = None) -> Finding:
        """Return the bounds that hold under given settings; see `check`.

        Args:
            given: files of the framework, and settings KEY=VALUE; a later one replaces an earlier one.
            delta: δ; None: that of the settings, else 1e-5.

        Raises:
            SilodpError: a file that cannot be read, or a setting that is missing, out of range, or given as
                KEY=VALUE and not known.
        """
        settings = read_settings(self, given)
        finding = self.check(settings, delta)
        few = f"there are far fewer than 1/δ = {1 / finding.delta:,.3g} persons"
        return replace(
            finding,
            assumptions=(*finding.assumptions, few),
            unread=settings.list_unread(self.without_effect),
        )


def read_settings(framework: Framework, given: Sequence[str]) -> FrameworkSettings:
    """Read files and KEY=VALUE; a later one replaces an earlier one.

    Raises:
        SilodpError: a file that cannot be read or has no settings, or a text that sets nothing.
    """
    values: TomlTable = {}
    typed: TomlTable = {}
    for text in given:
        # A file may be named a=b.toml: what exists is read as a file.
        if re.fullmatch(r"[\w.-]+\s*=.*", text, re.DOTALL) and not Path(text).exists():
            one = _normalize_names(apply_override({}, text))
            values, typed = values | one, typed | one
        else:
            values |= _normalize_names(framework.pick(_read_file(Path(text), framework)))
    return FrameworkSettings(framework.name, values, typed)


def _normalize_names(values: TomlTable) -> TomlTable:
    return {normalize(key): value for key, value in values.items()}


def normalize(key: str) -> str:
    """Return the name of a setting with underscores."""
    return key.replace("-", "_")


def _read_file(path: Path, framework: Framework) -> Any:
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": parse_toml,
        ".json": parse_json,
        ".yaml": _read_flat_yaml,
        ".yml": _read_flat_yaml,
    }
    if path.suffix not in readers:
        raise SilodpError(
            f"{path} is neither a file of {framework.name} nor KEY=VALUE: name {framework.files}.",
            code="config.path",
        )
    try:
        return readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SilodpError(
            f"{path} cannot be read ({error.strerror}): name {framework.files}.", code="config.path"
        ) from None
    except ValueError:
        raise SilodpError(
            f"{path} is not valid {path.suffix[1:].upper()}: correct it.", code="config.value"
        ) from None


def _read_flat_yaml(text: str) -> TomlTable:
    """Return the lines KEY: VALUE of the top level, VALUE a list of numbers or one value; other lines are left out."""
    # No YAML library: what bounds depend on stands at the top level of these files.
    lines = re.findall(r"""^["']?([\w.-]+)["']?[ \t]*:[ \t]+([^#\n]+)""", text, re.MULTILINE)
    return {key: _read_yaml_value(value.strip()) for key, value in lines}


def _read_yaml_value(text: str) -> Any:
    """Return a truth value, a number or a list; what is none of them stays a text, which no setting accepts.

    Nor does a whole number with a leading zero, which YAML 1.1 reads as octal and YAML 1.2 as decimal.
    """
    if text.lower() in ("true", "yes", "on"):
        return True
    if text.lower() in ("false", "no", "off"):
        return False
    if re.fullmatch(r"[-+]?0[0-9_]+", text):
        return text
    with contextlib.suppress(ValueError):
        return parse_json(text)
    with contextlib.suppress(ValueError):
        return float(text)  # .5, 5. and 1_000 are numbers of YAML, and none of JSON
    return text


# --- bounds -------------------------------------------------------------------------------------------------------


def bound_units(
    adversary: str, delta: float, charges: Callable[[int], list[EventCount]], units: Mapping[str, int] = UNITS
) -> tuple[Bound, ...]:
    """Return a bound for each unit.

    Args:
        adversary: `SERVER` or `RELEASED`.
        delta: δ.
        charges: from the value of a unit to its events with their counts.
        units: name of the unit → its value.
    """
    costs = {unit: compute_bound(charges(value), delta) for unit, value in units.items()}
    return tuple(Bound(adversary, unit, cost.epsilon, cost.reason) for unit, cost in costs.items())


def no_guarantee(adversary: str, reason: str, units: Sequence[str] = (CLIENT, RECORD)) -> tuple[Bound, ...]:
    """Return that nothing is guaranteed for these units."""
    return tuple(Bound(adversary, unit, None, reason) for unit in units)


def exclude_entries(finding: Finding, settings: FrameworkSettings, name: str, entries: str) -> Finding:
    """Return the finding for a model without some entries, or without any guarantee where it has them.

    Args:
        finding: what holds for all other entries.
        settings: the settings.
        name: of the setting that says whether the model has such entries.
        entries: what they are, and why the noise does not cover them.
    """
    if not settings.flag(name, default=False):
        return replace(
            finding, assumptions=(*finding.assumptions, f"the model has no {entries} ({name}=true if it has)")
        )
    bounds = tuple(
        replace(bound, epsilon=None, reason=f"the model has {entries}") for bound in finding.bounds
    )
    return replace(finding, bounds=bounds)


def count_batches(settings: FrameworkSettings, size: int, prefix: str = "") -> int:
    """Return the number of batches of an epoch, as torch's loader makes them: `drop_last` leaves out a smaller one.

    Args:
        settings: the settings, `batch_size` among them.
        size: number of records.
        prefix: of the names `batch_size` and `drop_last`.
    """
    batch = settings.whole(f"{prefix}batch_size")
    is_dropped = settings.flag(f"{prefix}drop_last", default=False)
    # With fewer records than a batch, drop_last leaves no batch; one more can only raise ε.
    return max(1, size // batch if is_dropped else math.ceil(size / batch))


def compute_bound(charges: list[EventCount], delta: float) -> Cost:
    """Return the ε of some events at δ, or why there is none.

    Source: for Gaussian noise alone, Dong, Roth and Su 2022, Corollary 3.3.
    """
    cost = compute_cost(charges, delta, choose_accountant(event for event, _ in charges))
    # A release on a sample costs at most what it costs on everybody.
    whole = [(event.event if isinstance(event, RevealedSample) else event, count) for event, count in charges]
    releases = [(event, count) for event, count in whole if isinstance(event, Gaussian)]
    if cost.epsilon is None and len(releases) == len(charges):
        # Accountants promise nothing where noise is so small; here the number is of interest. Independent Gaussian
        # mechanisms are one whose 1/σ² is their sum.
        precision = math.fsum(count / event.noise_multiplier**2 for event, count in releases)
        return Cost(compute_gaussian_epsilon(precision**-0.5, delta))
    return cost
