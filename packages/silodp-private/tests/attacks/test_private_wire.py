"""Attacks of the wire, or of a silo with other constants, on private weighting.

Attacked is the set-up: counts, caps, and the secrets that blind them. Without signatures, length checks and agreement
on the cap, altered messages would change the weights of persons, so that one person counts more than the noise covers,
or would repeat masks over changed counts. Each attack ends in one error that names a party, and the run continues.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from silodp.errors import SilodpError
from silodp.runtime.silo import Silo
from silodp_private._reciprocal_shares import ReciprocalSilo
from support.oracles import small_federation
from support.private import LATTICE, PAILLIER, SAMPLED, run
from support.stores import side_of
from support.wires import Wire, altered, wire  # noqa: F401

PRIVATE = {"lattice": LATTICE, "paillier": PAILLIER}


def few(aggregator, **more):
    return run(aggregator, SAMPLED, federation=small_federation(users=5), **more)


@cache
def whole(name: str):
    return few(PRIVATE[name])


def assert_goes_on(name: str, out) -> None:
    """The run that was stopped ends as the one that was not."""
    resumed = few(PRIVATE[name], out=out, resume=True)
    assert torch.equal(resumed.params, whole(name).params)
    assert resumed.epsilon == whole(name).epsilon


# --- the wire ---

ENCRYPTED = ["array params", "blob nonce", "blob public key", "blob ciphertexts"]
SENT = [
    ("lattice", "masked counts", "silo1", [], ["array masked"]),
    ("lattice", "base", "silo0", ["blob offer"], ["blob reply"]),
    ("lattice", "reciprocals", "silo0", ["blob request"], ["blob answer"]),
    ("lattice", "sample", "silo0", ["blob request"], ["blob answer"]),
    ("lattice", "update", "silo1", ENCRYPTED, ["blob masked"]),
    ("paillier", "blinded counts", "silo1", ["blob key", "blob proof"], ["blob counts"]),
    ("paillier", "update", "silo1", ["array params", "blob inverses"], ["blob answer"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["to_silo", "to_server"])
@pytest.mark.parametrize(
    ("name", "kind", "silo", "down", "up"), SENT, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_flipped_bit_is_noticed_and_the_run_goes_on(name, kind, silo, down, up, direction, wire, tmp_path):  # noqa: F811
    parts = down if direction == "to_silo" else up
    if not parts:
        pytest.skip("it says nothing but its name, which test_wire_attacks alters")
    for number, part in enumerate(parts):
        found: list[set[str]] = []

        def tamper(to, message, part=part, found=found):
            due = message.kind == kind and message.round == (kind in ("sample", "update"))
            if due and to == silo and not found:
                found.append({f"array {a}" for a in message.arrays} | {f"blob {b}" for b in message.blobs})
                return altered(message, part)
            return message

        setattr(wire, direction, staticmethod(tamper))
        with pytest.raises(SilodpError, match=rf"'{silo}'.*(does not carry its signature)"):
            few(PRIVATE[name], out=tmp_path / str(number))
        assert found == [set(parts)], "everything that is sent was altered once"
    assert_goes_on(name, tmp_path / str(len(parts) - 1))


# --- silos that answer something else, and sign it ---


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "nothing"])
@pytest.mark.parametrize(("name", "kind", "silo"), [case[:3] for case in SENT])
def test_an_answer_of_the_wrong_length_is_refused_by_name(name, kind, silo, how, monkeypatch, tmp_path):
    honest = Silo.answer

    def short(self, request):
        answer = honest(self, request)
        if (self.name, request.kind) != (silo, kind):
            return answer
        if how == "nothing":
            return replace(answer, arrays={}, blobs={})
        return replace(
            answer,
            arrays={key: array[:-1] for key, array in answer.arrays.items()},
            blobs={key: blob[:-1] for key, blob in answer.blobs.items()},
        )

    monkeypatch.setattr(Silo, "answer", short)
    with pytest.raises(SilodpError, match=f"silo '{silo}'"):
        few(PRIVATE[name], out=tmp_path)
    monkeypatch.undo()
    if how == "cut":
        assert_goes_on(name, tmp_path)


def test_a_silo_that_does_not_cap_its_counts_sends_nothing(monkeypatch):
    monkeypatch.setattr(ReciprocalSilo, "capped_counts", property(lambda self: self._context.counts))
    with pytest.raises(
        SilodpError, match=r"silo 'silo0' refused: counts must lie between 0 and the public cap of 1"
    ):
        few(replace(LATTICE, count_cap=1))


@pytest.mark.parametrize("name", PRIVATE)
def test_a_silo_with_another_cap_does_not_take_part(name, monkeypatch):
    def other(data, *, spec, **more):
        cap = 2 if data.name == "silo1" else spec.aggregator.count_cap
        aggregator = replace(spec.aggregator, count_cap=cap)
        return Silo(data, spec=replace(spec, aggregator=aggregator), **more)

    monkeypatch.setattr("silodp.runtime.series.Silo", other)
    with pytest.raises(SilodpError, match=r"the transcript of silo 'silo1'.*does not hold"):
        few(PRIVATE[name])


@pytest.mark.parametrize("name", PRIVATE)
def test_a_set_up_begun_anew_has_new_secrets(name, wire, tmp_path):  # noqa: F811
    """With the old masks the counts of silos that changed in between would show as differences."""
    kind = {"lattice": "reciprocals", "paillier": "blinded counts"}[name]
    wire.fails = staticmethod(lambda silo, m: "after" if (silo, m.kind) == ("silo0", kind) else None)
    secrets: list[tuple[bytes, ...]] = []
    with pytest.raises(SilodpError, match="'silo0'"):
        few(PRIVATE[name], out=tmp_path)
    secrets.append(secrets_of(name, wire))
    wire.fails = staticmethod(lambda silo, m: None)
    assert_goes_on(name, tmp_path)
    secrets.append(secrets_of(name, wire))
    for before, after in zip(*secrets, strict=True):
        assert before != after


def secrets_of(name: str, wire: type[Wire]) -> tuple[bytes, ...]:  # noqa: F811
    """R; ρ and c, or nothing more; and what the server was told of the counts."""
    side = side_of(wire.last.parties["silo2"].silo)
    run_id = wire.received[-1][1].run
    group = side._member.group_secret(run_id)
    if name == "paillier":
        told = [m.blobs["counts"] for s, m in wire.received if (s, m.kind) == ("silo0", "blinded counts")]
        return group, told[-1]
    shares = side.silo_shares(run_id)
    told = [
        m.arrays["masked"].tobytes() for s, m in wire.received if (s, m.kind) == ("silo0", "masked counts")
    ]
    return group, shares.parameters.count_masks(shares).tobytes(), shares.shares().tobytes(), told[-1]
