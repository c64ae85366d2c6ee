"""The base class of aggregators: how silos' shares become their sum, and therefore who sees what.

An aggregator is a frozen dataclass of public constants. It makes two objects for a run, one for the server and one for
each silo, from the same `RunSpec`. Methods do not depend on the aggregator. Everything that a run, a plan or a report
needs of an aggregator is a member of `Aggregator`, so a new one is one file (tests/plugins/trimmed.py is an example).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import numpy as np

from silodp.accounting.events import Event
from silodp.accounting.views import ADVERSARIES, Adversary, View
from silodp.assumption import Assumption
from silodp.errors import SilodpError
from silodp.methods.base import Method
from silodp.settings import Settings
from silodp.text import name_class, pluralize, shorten

if TYPE_CHECKING:
    from torch import Tensor

    from silodp.aggregators.run_spec import RunSpec
    from silodp.crypto.keys import Identity
    from silodp.mechanisms.clipping import Update
    from silodp.wire.messages import Message
    from silodp.wire.schemas import Array, MessageSchedule, MessageType
    from silodp.wire.store import RoundStore
    from silodp.wire.transport import DeliveryFailure


T = TypeVar("T")


class LocalWork(Protocol):
    """What a silo has to compute for one release of a round; nothing is computed before it is asked for."""

    @property
    def noise(self) -> np.random.Generator:
        """The secret stream of this silo's share of the noise."""

    def compute_update(self) -> Update:
        """Return the silo's update; its rows come to this process."""

    def make_share(self, add_noise: Callable[[Update, Tensor, np.random.Generator], T]) -> T:
        """Return the noisy share that a function makes of the update, the weights (U,) float64 and `noise`.

        The function can be pickled: it is called where the update is computed, unless that is in several places.
        """


LocalUpdateFn = Callable[[int], LocalWork]
"""Release number of a round -> what the silo computes for it."""

Handler = Callable[["Message"], "Message"]
"""Answer one kind of request."""

SampledBy = Literal["silos", "server", "nobody"]
"""Who knows which users take part in a round: every silo and not the server, the server alone, or nobody."""


class ServerContext(Protocol):
    """What the server lends its side of an aggregator."""

    @property
    def store(self) -> RoundStore:
        """The server's durable memory: what is put in a round's namespace is dropped with the round."""

    def ask(self, requests: dict[str, Message]) -> tuple[dict[str, Message], dict[str, DeliveryFailure]]:
        """Send one request to each silo named, and wait.

        Returns:
            answers, each of its kind's type, and failures, both by the name of the silo.
        """

    def ask_all(self, requests: dict[str, Message]) -> dict[str, Message]:
        """Send one request to each silo named, and wait; raise if one of them does not answer."""

    def charged(self, round_: int, release: int) -> bool:
        """Return whether a release was charged before."""

    def affords(self, round_: int, release: int, survivors: int) -> bool:
        """Return whether a release may still be charged, or was."""

    def charge(self, round_: int, release: int, survivors: int) -> bool:
        """Charge a release durably, before anything of it can be seen.

        Args:
            round_: counted from 0.
            release: counted from 0 within the round; a further one has fresh noise.
            survivors: number of silos whose noise is in the sum.

        Returns:
            False, with nothing charged, if the budget forbids it.
        """


class ServerAggregator(Protocol):
    """The server's side of an aggregator in one run."""

    def set_up(self, context: ServerContext) -> None:
        """Exchange what is needed once per run, before the first round; a repeated call does nothing twice."""

    def total(self, context: ServerContext, round_: int, arrays: Mapping[str, np.ndarray]) -> Tensor | None:
        """Add up the silos' shares of one round.

        `context.charge` must be called before anything is sent that lets the sum, or a part of it, be seen.

        Args:
            context: the server.
            round_: counted from 0.
            arrays: of the round's requests, see `round_arrays`.

        Returns:
            Σ_s share_s (`RunSpec.sum_size`,) float64; None if the budget forbids the release.
        """


class SiloAggregator(Protocol):
    """A silo's side of an aggregator in one run."""

    handlers: Mapping[str, Handler]
    """The functions that answer every request of the script but "counts", "setup" and "update", by kind."""

    def group_secret(self, run: str) -> bytes:
        """Return the secret (32 bytes) that all silos of the session share; asked for where silos draw the sample."""

    def update(self, request: Message, work: LocalUpdateFn) -> tuple[Message, int]:
        """Answer a round's request with this silo's share.

        Args:
            request: of kind "update"; it passed the silo's gate and was charged in the silo's ledger.
            work: trains and clips, for a release of the round.

        Returns:
            the answer, and how many rows were not finite, which stays in the silo.
        """


@dataclass(frozen=True)
class SiloContext:
    """What only one silo knows; counts and keys do not show when it is printed.

    Attributes:
        identity: The silo's long-term key pair.
        pins: The pinned Ed25519 public keys of all silos, 32 bytes each, by name.
        store: The silo's durable store of the run.
        counts: The silo's numbers of records n[s,u], shape (U,) int64.
        masked: A function that returns the digest (hexadecimal) of the update that the silo masked last.
    """

    identity: Identity
    pins: Mapping[str, bytes]
    store: RoundStore = field(repr=False)
    counts: np.ndarray = field(repr=False)
    masked: Callable[[], str] = field(repr=False)


@dataclass(frozen=True)
class Visibility:
    """A row of a report's table of who sees what.

    Attributes:
        party: One party of the run.
        sees: What it sees beyond what is public.
        not_seen: What it does not see.
    """

    party: str
    sees: str
    not_seen: str


COUNTS_OF_PERSONS = "single persons' record counts"
OTHER_SILOS = f"other silos' sums and records, and {COUNTS_OF_PERSONS} there"
DISCLOSED_COUNTS = (
    "where weights are not uniform, each person's record counts or, with 'present', their silos"
)
RECIPIENT = Visibility(
    "Whoever gets the models",
    "the global models, as many as were handed on",
    "any silo's part in them; who was sampled in a round; " + COUNTS_OF_PERSONS,
)


@dataclass(frozen=True, repr=False)
class Aggregator(Settings, ABC):
    """Public constants of how shares are added up; the base class of every aggregator.

    A subclass is a frozen dataclass whose fields are its settings in a configuration. It must define `script`,
    `server` and `silo`. The other members have defaults, which hold for an aggregator under which the server sees each
    silo's noisy share: one that hides more overrides `views` and `visibility`, one that draws other noise overrides
    `event`. The three must describe the same protocol, since ε is computed from what they say.

    A setting that each party may choose for itself because the sum does not depend on it, such as a device, is declared
    as `field(compare=False, repr=False)`: then it is no part of what silos sign.
    """

    @property
    def name(self) -> str:
        """Its name in a configuration, a ledger and a report."""
        return type(self).__name__

    @property
    def settings(self) -> dict[str, Any]:
        """Its public settings by name, without those that are None; a run directory keeps them."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.compare}
        return {name: value for name, value in given.items() if value is not None}

    def __repr__(self) -> str:
        # Part of what silos sign and of a run's fingerprint: its form is stored, and stays.
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        shown |= {"name": self.name, "exact": self.adds_integers, "weights_privately": self.weights_privately}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    # --- what it is ---

    @property
    def adds_integers(self) -> bool:
        """Whether shares are integers with integer noise, so that sums are exact."""
        return False

    def noise_step(self, spec: RunSpec) -> float | None:
        """Return the grid step of integer noise, where truncated rows and noise are added as they are.

        The limit of a sum rests on it (`limits.find_longest_sum`): whoever rounds, or adds other noise, overrides this.

        Args:
            spec: Public constants; the method has bounds.

        Returns:
            In units of the update; None: it is not said, and a coarse step and a rounded sum are allowed for.
        """
        return None

    @property
    def weights_privately(self) -> bool:
        """Whether silos weight by record counts that no other party learns."""
        return False

    @property
    def sampled_by(self) -> SampledBy:
        """Who draws a round's sample of users, and therefore knows it: by default the silos (`PersonCoins`)."""
        return "silos"

    @property
    def max_rounds(self) -> int | None:
        """Most rounds of a run, repeated attempts included; None: no limit."""
        return None

    @property
    def delta_share(self) -> float:
        """The part of δ, in (0, 1], that noise is accounted at; the rest pays for what encryption discloses."""
        return 1.0

    def disclosure(self, spec: RunSpec) -> Mapping[Adversary, float]:
        """Return the distance between what an adversary sees of a whole run and what the run's events describe.

        Let TV be their total variation distance. If the events are (ε, δ')-private, then what the adversary sees is
        (ε, δ' + (1 + e^ε)·TV)-private. Over several runs the distances add up, at the ε of all runs together
        (docs/privacy.md, section 3).

        Args:
            spec: public constants.

        Returns:
            TV by adversary; an adversary who is not listed has 0. By default nobody is listed, unless `delta_share`
            keeps a part of δ: then everyone has 1, with which no ε holds, until a subclass states its distances.
        """
        return {} if self.delta_share == 1 else dict.fromkeys(ADVERSARIES, 1.0)

    @property
    def assumptions(self) -> tuple[Assumption | str, ...]:
        """What hiding the parts of the sum rests on; a guarantee lists them."""
        return ()

    def check(self, spec: RunSpec) -> None:
        """Refuse, before anything runs, what cannot be added up this way; by default nothing.

        Raises:
            SilodpError: naming the setting at fault and a remedy.
        """

    def series_aggregator(self, spec: RunSpec) -> Aggregator | None:
        """Return the aggregator that adds up the sums of an additional series, in a run under this one.

        It must add: its total is the sum of the silos' shares, each a sum of clipped rows and its noise, and nothing
        else. ε of a series is computed from its `views` and `event`, which get the method and the specification of
        the series. An aggregator that adds may return itself.

        One that is returned in its place must not weaken what this one promises. A series refuses it where
        it lets an adversary see single shares who otherwise would not, adds noise in floating point where this one
        adds integers, rests on assumptions that this one does not state, or has a `disclosure` of its own.

        Args:
            spec: the specification of the run.

        Returns:
            None, the default, where no aggregator is known to add them: evaluation by sums is refused.
        """
        return None

    def min_silos_for(self, silos: int) -> int:
        """Return m, the fewest silos whose shares are added up, of `silos`; noise is sized for m shares."""
        return silos

    # --- who sees what, and what it costs ---

    def views(self, method: Method, silos: int, survivors: int | None = None) -> dict[Adversary, View]:
        """Return what each adversary sees of one round.

        By default the server sees every share: the second column of docs/privacy.md, section 3.

        Args:
            method: the run's.
            silos: S.
            survivors: number of silos that answer the round; None: all.
        """
        disclosed = method.needs_counts
        return {
            "released": View("released", silos),
            "server": View("server", silos, sees_shares=True, counts_disclosed=disclosed),
            "silo": View("silo", silos, knows_sample=True, counts_disclosed=disclosed),
        }

    def event(self, spec: RunSpec, view: View) -> Event:
        """Return what one round costs against a view, with the noise that is drawn; by default the method's event.

        Post-processing at the server does not change it. Whatever weakens the noise in what an adversary sees does.
        """
        return spec.method.dp_event(view)

    @property
    def visibility(self) -> tuple[Visibility, ...]:
        """Who sees what, for people; each party is assumed to follow the protocol and not to pool what it sees."""
        return (
            Visibility(
                "The server",
                f"every silo's noisy sum, on its own; {DISCLOSED_COUNTS}, silo by silo",
                "who was sampled; records; a single person's update; sums without noise",
            ),
            Visibility(
                "Each silo",
                "the global models; who was sampled; where weights are not uniform, what its weights say of its "
                "persons' records in other silos",
                OTHER_SILOS,
            ),
            RECIPIENT,
        )

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return what it costs and what its limits are, by a name for people; a plan shows it."""
        return {}

    # --- how it is done ---

    @abstractmethod
    def script(self, spec: RunSpec, name: str) -> MessageSchedule:
        """Return the messages that the silo of this name answers, with their types; its gate admits no others.

        `setup_kinds` and `round_arrays` give the parts that do not depend on the aggregator.
        """

    @abstractmethod
    def server(self, spec: RunSpec) -> ServerAggregator:
        """Return the server's side of a run."""

    @abstractmethod
    def silo(self, spec: RunSpec, context: SiloContext) -> SiloAggregator:
        """Return a silo's side of a run."""


def check_statements(aggregator: Aggregator) -> None:
    """Check what an aggregator states of itself, which a run stores with its guarantee after all rounds.

    Raises:
        SilodpError: `visibility` or `delta_share` is not what a report needs (code plugin.returned).
    """
    rows: object = aggregator.visibility
    is_table = isinstance(rows, Sequence) and all(
        isinstance(row, Visibility) and all(isinstance(text, str) for text in vars(row).values())
        for row in rows
    )
    share: object = aggregator.delta_share
    is_share = isinstance(share, Real) and 0 < cast(float, share) <= 1
    if is_table and is_share:
        return
    name, wrong, remedy = (
        ("delta_share", share, "give a number above 0 and at most 1")
        if is_table
        else ("visibility", rows, "give a tuple of Visibility(party, sees, not_seen), three texts each")
    )
    raise SilodpError(
        f"the aggregator {name_class(type(aggregator))}: {name} is {shorten(wrong)}: {remedy}.",
        code="plugin.returned",
        field="aggregator",
    )


def setup_kinds(spec: RunSpec, weights_privately: bool = False) -> tuple[MessageType, ...]:
    """Return the messages of the set-up that every script begins with.

    Args:
        spec: public constants.
        weights_privately: whether the server sees neither counts nor weights.

    Returns:
        "setup", after "counts" and with the silo's weights where they go by counts. Other weights and the sample of a
        round travel in no message: silos find them by themselves.
    """
    from silodp.wire.schemas import Array, MessageSchema, MessageType

    persons = (spec.population.users,)
    if weights_privately or not spec.method.needs_counts:
        return (MessageType("setup"),)
    counts = MessageType("counts", answer=MessageSchema(arrays={"counts": Array("int64", persons)}))
    return counts, MessageType(
        "setup", MessageSchema(arrays={"weights": Array("float64", persons, finite=True)})
    )


def round_arrays(spec: RunSpec) -> dict[str, Array]:
    """Return the arrays of an update: the model, the silos that the method samples, and its state."""
    from silodp.wire.schemas import Array

    arrays = {"params": Array(spec.dtype, (spec.size,), finite=True)}
    if spec.method.samples_silos:
        arrays["clients"] = Array("bool", (spec.population.silos,))
    initial = spec.method.initial_state(spec.population)
    state = {name: Array(str(value.dtype), value.shape, finite=True) for name, value in initial.items()}
    return {**arrays, **request_state(state)}


_STATE = "state."
SEALED_SAMPLE_BLOB, CHOICES_BLOB = "sampled", "choices"
"""The blobs of an update that differ between silos: what silo 0 sealed for the one that is asked, and the server's
choices in transfers of that silo."""


def request_state(state: Mapping[str, T]) -> dict[str, T]:
    """Return the method's state, or the types of its arrays, as entries of an update's request."""
    return {_STATE + name: value for name, value in state.items()}


def state_of(request: Message) -> dict[str, np.ndarray]:
    """Return the method's state that an update's request carries."""
    return {name[len(_STATE) :]: value for name, value in request.arrays.items() if name.startswith(_STATE)}


def model_and_sample(request: Message) -> str:
    """Return the digest of what a silo's values in a round depend on: the model, its state, silos sampled."""
    from silodp.wire.messages import Message

    return Message("update", request.run, request.round, arrays=request.arrays).digest()


def common_digest(request: Message) -> str:
    """Return the digest of the part of an update that is the same for every silo on its roster.

    Masks and seals are derived from it: silos that were sent different updates, or one that is sent another update
    after its store was restored from an old copy, share no masks, so none of their values can be subtracted.
    """
    own = (SEALED_SAMPLE_BLOB, CHOICES_BLOB)
    if not any(name in request.blobs for name in own):
        return request.digest()
    common = {name: blob for name, blob in request.blobs.items() if name not in own}
    return replace(request, blobs=common).digest()


def check_attempts(aggregator: Aggregator, rounds: int) -> None:
    """Refuse more rounds than an aggregator's constants are chosen for.

    Raises:
        SilodpError: there are more (code argument.conflict).
    """
    if aggregator.max_rounds is not None and rounds > aggregator.max_rounds:
        raise SilodpError(
            f"rounds = {rounds}: aggregator '{aggregator.name}' is set for "
            f"{pluralize(aggregator.max_rounds, 'attempt')}; raise attempts (in a config: aggregation.attempts; in "
            "silodp epsilon: --aggregation attempts=N), leaving room for rounds that must be repeated.",
            code="argument.conflict",
            field="rounds",
        )
