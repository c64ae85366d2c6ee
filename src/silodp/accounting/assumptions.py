"""The assumptions on which guarantees rest, and what no guarantee covers, as they are stored and shown."""

from __future__ import annotations

from silodp.accounting.views import View

HELD_OUT = (
    "records held out for testing: they are not trained on, and the metrics on them are published as they are"
)
ON_THE_LIST = "that a person's id is on the public list of ids"
NOT_COVERED: tuple[str, ...] = (
    "metrics computed on private records, held-out ones included, and everything chosen by looking at them: the best "
    "round, early stopping, tuning",
    "further runs on the same people: each adds its own ε",
    "how long rounds took and how many updates were not finite, which metrics.jsonl and the report tell",
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


DROPOUTS = (
    "silos and server follow the protocol, and whether a silo drops out does not depend on its records nor on the "
    "models, nor on who was sampled and what noise was drawn"
)
TECHNICAL = "technical: "
"""Prefix of an assumption about arithmetic or cryptography. The report lists all assumptions without it under
"Assumptions that somebody must sign"."""


FLOATING_POINT_NOISE = (
    TECHNICAL
    + "noise is drawn and added in floating point: attacks on the low bits of floating-point noise are not excluded"
)
SHARED_ROUNDING = (
    TECHNICAL
    + "nobody chooses a model for an attack: updates of a silo are computed side by side in floating point, "
    "and with a model chosen for it, rounding lets one person move the sum by many clips while one is charged"
)
SEPARATE_ROUNDING = (
    TECHNICAL
    + "updates are computed in floating point, each person's or record's alone: the same computation gives the same "
    "bits, whatever a silo computed before it"
)
PUBLIC_INDEX = (
    "every silo knows a person by the same id, and anyone may learn whose ids are on the list of ids, which silos take "
    "part, and all settings of the run"
)
LOCAL_INDEX = (
    "every silo knows a person by one id, the same in all silos; anyone may learn which silos take part, and all "
    "settings of the run"
)
PUBLIC_VALUES = (
    "no value that the model came with (frozen parts, buffers, attributes, parameters not drawn anew) was computed "
    "from private records"
)
OTHER_CODE = (
    "code that came neither with silodp nor with torch (of the model, the loss, the metrics or a plug-in) computes "
    "what it returns from its arguments alone, and changes nothing else: what it keeps to act later cannot be seen"
)
SECRET_SAMPLE = (
    "the silos have compared their keys by another channel, and none of them tells the server who was sampled; "
    "whether, when and with what error a silo fails depends on no sample"
)
COINS = (
    TECHNICAL
    + "who was sampled stays unknown as long as nobody breaks X25519, Ed25519, HMAC-SHA256 or AES-256"
)


def list_assumptions(
    view: View,
    integers: bool = False,
    *,
    public_index: bool = True,
    samples_users: bool = False,
    separate: bool = False,
) -> tuple[str, ...]:
    """Return the assumptions of a guarantee against this adversary under any method.

    Args:
        view: of the adversary.
        integers: whether noise is added to integers.
        public_index: whether the run needs a public list of ids.
        samples_users: whether users are sampled.
        separate: whether every person (or record) is computed alone.
    """
    common = (
        PUBLIC_INDEX if public_index else LOCAL_INDEX,
        DROPOUTS,
        SEPARATE_ROUNDING if separate else SHARED_ROUNDING,
        # Integer noise is added exactly, so it has no low bits to attack.
        *(() if integers else (FLOATING_POINT_NOISE,)),
        "the run's directory was never copied or restored and continued twice",
    )
    own = {
        "released": (
            "whoever sees the models sees no single silo's updates"
            if view.knows_sample
            else "whoever sees the models sees neither single silos' updates nor who was sampled in a round",
        ),
        "server": (
            "the server does not collude with a silo",
            *((SECRET_SAMPLE, COINS) if samples_users and not view.knows_sample else ()),
        ),
        "silo": (
            f"at most {view.colluding} of the {view.silos} silos pool what they know, without the server; "
            "the guarantee is about a person's records in the other silos",
        ),
    }
    return common + own[view.adversary]
