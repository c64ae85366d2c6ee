"""Guarantees: what is proven against each adversary, under which assumptions, and ε as text for readers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from silodp.accounting.views import Adversary, Unit, View
from silodp.assumption import (
    ID_GIVERS,
    OPERATORS,
    SERVER_OPERATOR,
    SILO_OPERATORS,
    Assumption,
)

FORMAT = 1
"""Of guarantee.json."""


@dataclass(frozen=True)
class Guarantee:
    """What is proven against one adversary, for which unit, under which assumptions, by which accountant.

    Attributes:
        adversary: The adversary against whom it holds.
        unit: Who is protected, "user" or "record"; None without privacy.
        epsilon: An upper bound of ε at `delta`; None where nothing is promised.
        delta: The δ of the guarantee.
        rounds: The number of rounds that were charged.
        accountant: The name of the accountant, as it is stored.
        method: The name of the method.
        private: Whether anything is promised.
        releasable: Whether the model may be released; False where the noise came from a fixed seed.
        reason: A clause that says why nothing is promised; None where something is.
        assumptions: The assumptions on which the guarantee rests.
        not_covered: What the guarantee does not cover, one clause each.
        persons: The pairs (k, ε or None) for persons with k records, where the unit is a record.
        groups: One entry for each budget, with what was requested and what was spent, where units have their own.
        claims: Each ε that a paper claims for this run and nobody has proven, {"epsilon", "why"}; never the guarantee.
        any_dropouts: The ε that holds even if dropouts depend on the models, where some silos may fail to answer.
        sample_known: The ε against an adversary who learns who was sampled, for example because a silo hands on the
            secret of all silos; None where nobody is sampled, or the sample is known anyway.
        linkage: The ε of a person who is known under several ids, or whose records are filed under another person's,
            {"case", "epsilon", "estimate"}; an estimate is computed and not proven.
    """

    adversary: Adversary
    unit: Unit | None
    epsilon: float | None
    delta: float
    rounds: int
    accountant: str
    method: str
    private: bool
    releasable: bool
    reason: str | None = None
    assumptions: tuple[Assumption, ...] = ()
    not_covered: tuple[str, ...] = ()
    persons: tuple[tuple[int, float | None], ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    claims: tuple[dict[str, Any], ...] = ()
    any_dropouts: float | None = None
    sample_known: float | None = None
    linkage: tuple[dict[str, Any], ...] = ()

    def __str__(self) -> str:
        if self.epsilon is None:
            return f"{self.adversary:9} no guarantee: {self.reason}"
        cap = describe_reservations(self.any_dropouts, self.sample_known)
        return (
            f"{self.adversary:9} ε = {format_epsilon(self.epsilon)} at δ = {self.delta:g}, for "
            f"{describe_unit(self.unit)}{cap}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Guarantee:
        """Return the guarantee of fields that `to_dict` made.

        Raises:
            ValueError, TypeError: They are no such fields.
        """
        if fields.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("not the fields of a guarantee")
        lists = {
            name: tuple(fields[name]) for name in ("not_covered", "persons", "groups", "claims", "linkage")
        }
        lists["assumptions"] = tuple(map(Assumption.from_dict, fields["assumptions"]))
        # JSON has no tuples, and a guarantee read from a file must equal one that is derived again.
        lists["persons"] = tuple((records, epsilon) for records, epsilon in lists["persons"])
        return cls(**{**fields, **lists})


def describe_unit(unit: str | None) -> str:
    """Return whom an ε is for, by the unit of the method; that of the method without privacy (None) has no ε."""
    return "one record" if unit == "record" else "all records of one person"


def format_epsilon(epsilon: float | None) -> str:
    """Return ε rounded up, never down; "none" for None or infinity.

    To three decimals, of an ε below 1 to three figures; as a power of ten from a million on and below a millionth.
    """
    if epsilon is None or math.isinf(epsilon):
        return "none"
    if epsilon == 0:
        return "0"
    epsilon = max(epsilon, 1e-300)  # so that the powers below are floats
    exponent = math.floor(math.log10(epsilon))
    is_usual = -6 <= exponent < 6
    # 2 − exponent digits after the point are three figures in all.
    digits = max(3, 2 - exponent) if is_usual else 2 - exponent
    # The last digits of a float are no reason for a larger ε: 0.1 · 1000 is a little more than 100.
    rounded = math.ceil(epsilon * 10.0**digits - 1e-9) / 10.0**digits
    return f"{rounded:.{digits}f}".rstrip("0").rstrip(".") if is_usual else f"{rounded:.2e}"


def describe_any_dropouts(epsilon: float) -> str:
    """Return a phrase with the ε that holds if silos drop out depending on the models."""
    return f"at most {format_epsilon(epsilon)} if silos drop out depending on the models"


def describe_reservations(any_dropouts: float | None, sample_known: float | None) -> str:
    """Return " (...)" with the ε that hold under weaker assumptions; "" where there are none."""
    phrases = [] if any_dropouts is None else [describe_any_dropouts(any_dropouts)]
    if sample_known is not None:
        phrases.append(f"{format_epsilon(sample_known)} if it learns who was sampled")
    return f" ({'; '.join(phrases)})" if phrases else ""


# --- assumptions, and what no guarantee covers, as they are stored and shown ------------------------------------------

HELD_OUT = (
    "records held out for testing: they are not trained on, and the metrics on them are published as they are"
)
ON_THE_LIST = "that a person's id is on the public list of ids"
NOT_COVERED: tuple[str, ...] = (
    "metrics computed on private records, held-out ones included, and everything chosen by looking at them: the best "
    "round, early stopping, tuning",
    "further runs on the same people: each adds its own ε",
    "how long rounds took, which metrics.jsonl tells, and how many updates were not finite, which the report tells too",
    ON_THE_LIST,
    HELD_OUT,
)
"""What no ε of a run covers (docs/privacy.md, section 1)."""


def list_not_covered(measured: bool, has_list: bool) -> tuple[str, ...]:
    """Return what no ε of a run covers.

    Args:
        measured: whether pooled held-out records measure the model.
        has_list: whether the run has a public list of ids.
    """
    # A text about something that the run does not have would only tire its readers.
    absent = {HELD_OUT: not measured, ON_THE_LIST: not has_list}
    return tuple(text for text in NOT_COVERED if not absent.get(text))


DROPOUTS = Assumption(
    "protocol-followed",
    "silos and server follow the protocol, and whether a silo drops out does not depend on its records nor on the "
    "models, nor on who was sampled and what noise was drawn",
    OPERATORS,
)
DROPOUTS_WITHOUT_SAMPLES = replace(DROPOUTS, text=DROPOUTS.text.replace("who was sampled and ", ""))
FLOATING_POINT_NOISE = Assumption(
    "noise-in-floating-point",
    "nobody attacks the low bits of the noise, which is drawn and added in floating point",
    technical=True,
)
SHARED_ROUNDING = Assumption(
    "rounding-side-by-side",
    "nobody chooses a model for an attack: updates of a silo are computed side by side in floating point, "
    "and with a model chosen for it, rounding lets one person move the sum by many clips while one is charged",
    technical=True,
)
ISOLATED_ROUNDING = Assumption(
    "rounding-alone",
    "updates are computed in floating point, each person's or record's alone: the same computation gives the same "
    "bits, whatever a silo computed before it",
    technical=True,
)
PUBLIC_INDEX = Assumption(
    "same-id-and-list",
    "every silo knows a person by the same id, and anyone may learn whose ids are on the list of ids, which silos take "
    "part, and all settings of the run",
    ID_GIVERS,
)
INDEX_VERIFIED_IN_PART = Assumption(
    "verified-id-and-list",
    "every silo knows a person by a verified id, by an id of its own, or by both; anyone may learn whose ids are on "
    "the list of ids, which silos take part, and all settings of the run",
    ID_GIVERS,
)
LOCAL_INDEX = Assumption(
    "same-id",
    "every silo knows a person by one id, the same in all silos; anyone may learn which silos take part, and all "
    "settings of the run",
    ID_GIVERS,
)
PUBLIC_VALUES = Assumption(
    "start-public",
    "no value that the model came with (frozen parts, buffers, attributes, parameters not drawn anew) was computed "
    "from private records",
    "whoever made the model that the run began with",
)
OTHER_CODE = Assumption(
    "other-code",
    "code that came neither with silodp nor with torch (of the model, the loss, the metrics or a plug-in) computes "
    "what it returns from its arguments alone, and changes nothing else: what it keeps to act later cannot be seen",
    "whoever wrote or has read that code",
)
SECRET_SAMPLE = Assumption(
    "sample-secret",
    "the silos have compared their keys by another channel, and none of them tells the server who was sampled; "
    "whether, when and with what error a silo fails depends on no sample",
    SILO_OPERATORS,
)
SUM_UNSEEN = Assumption(
    "updates-unseen",
    "whoever sees the models sees no single silo's updates",
    f"{OPERATORS}, and whoever hands on the models",
)
SUM_AND_SAMPLE_UNSEEN = replace(
    SUM_UNSEEN,
    text="whoever sees the models sees neither single silos' updates nor who was sampled in a round",
)
CONTINUED_ONCE = Assumption(
    "continued-once",
    "the run's directory was never copied or restored and continued twice",
    "whoever administers the machines of the run",
)
NO_COLLUSION = Assumption(
    "no-collusion",
    "the server does not collude with a silo",
    "the organizations behind the server and the silos",
)
SERVER_FOLLOWS = Assumption(
    "server-follows",
    "the server follows the protocol: it draws samples and computes weights as the method says (one silo sees its own "
    "weights only, and cannot check that a person's add to at most 1 over all silos)",
    SERVER_OPERATOR,
)
"""Of aggregators with masks; a guarantee leaves it out where nothing is sampled and weights are public."""
SERVER_CHOOSES_PRIMARY_SILOS = Assumption(
    "server-chooses-primary-silos",
    "the server follows the protocol: it draws samples as the method says, and chooses each person's row from their "
    "primary silo alone (a silo cannot check what is chosen in another one)",
    SERVER_OPERATOR,
)
UNTIMED = Assumption(
    "silo-timing",
    "nobody measures how long a silo takes, which may tell how many persons have records in it",
    SILO_OPERATORS,
)
COINS = Assumption(
    "sample-cryptography",
    "who was sampled stays unknown as long as nobody breaks X25519, Ed25519, HMAC-SHA256 or AES-256",
    technical=True,
)


def list_assumptions(
    view: View,
    integers: bool = False,
    *,
    public_index: bool = True,
    several_ids: bool = False,
    samples_users: bool = False,
    is_sampled: bool = True,
    isolate_units: bool = False,
) -> tuple[Assumption, ...]:
    """Return the assumptions of a guarantee against this adversary under any method.

    Args:
        view: of the adversary.
        integers: whether noise is added to integers.
        public_index: whether the run needs a public list of ids.
        several_ids: whether a person may have several ids on it.
        samples_users: whether users are sampled.
        is_sampled: whether users, records or silos are sampled.
        isolate_units: whether every person (or record) is computed alone.
    """
    by_list = INDEX_VERIFIED_IN_PART if several_ids else PUBLIC_INDEX
    common = (
        by_list if public_index else LOCAL_INDEX,
        DROPOUTS if is_sampled else DROPOUTS_WITHOUT_SAMPLES,
        ISOLATED_ROUNDING if isolate_units else SHARED_ROUNDING,
        # Integer noise is added exactly, so it has no low bits to attack.
        *(() if integers else (FLOATING_POINT_NOISE,)),
        CONTINUED_ONCE,
    )
    own: dict[Adversary, tuple[Assumption, ...]] = {
        "released": (SUM_AND_SAMPLE_UNSEEN if is_sampled and not view.knows_sample else SUM_UNSEEN,),
        "server": (
            NO_COLLUSION,
            *((SECRET_SAMPLE, COINS) if samples_users and not view.knows_sample else ()),
        ),
        "silo": (
            Assumption(
                "few-silos-pool",
                f"at most {view.colluding} of the {view.silos} silos pool what they know, without the server; "
                "the guarantee is about a person's records in the other silos",
                "the organizations behind the silos",
            ),
        ),
    }
    return common + own[view.adversary]
