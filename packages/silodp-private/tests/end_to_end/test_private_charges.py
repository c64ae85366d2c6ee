"""Private weighting in whole runs: the noise that is charged is there, and lost silos cost what they should."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from silodp.data.federation import Federation
from silodp.errors import SilodpError
from silodp.runtime.server import Server
from silodp.training.sgd.local import LocalTraining
from silodp_private import lattice
from silodp_private.crypto.lattice.scheme import LatticeServer
from silodp_private.paillier import aggregator as paillier
from silodp_private.paillier.weighting import PaillierServer
from support.clear import released
from support.masked import at, charges, multipliers
from support.oracles import judges_std, small_federation
from support.private import LATTICE, PAILLIER, RECORDS, SAMPLED, Parties, in_clear, run, spec
from support.wires import Wire, wire  # noqa: F401

BOTH = pytest.mark.parametrize("aggregator", [LATTICE, PAILLIER], ids=lambda a: a.name)

# --- noise: two rounds of one model differ by noise alone ---

WIDE = 1500
STILL = replace(RECORDS, local=LocalTraining(learning_rate=0.1, epochs=2, batch_size=None))


@pytest.fixture
def unmoved(monkeypatch) -> None:
    step = Server.step
    monkeypatch.setattr(Server, "step", lambda self, before, total: step(self, before, total * 0))


def wide(silos: int = 3) -> Federation:
    return small_federation(silos=silos, features=WIDE - 1)


def units_of(aggregator) -> float:
    return in_clear(aggregator).grid(spec(STILL, size=WIDE)).units


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("lost", [False, True], ids=["all", "three of four"])
def test_the_noise_in_a_sum_is_the_noise_that_is_charged(aggregator, lost, unmoved, wire):  # noqa: F811
    """σ is accepted, 2σ/3 and 3σ/2 are not."""
    silos = 4 if lost else 3
    if lost:
        aggregator = replace(aggregator, min_silos=3)
        wire.fails = staticmethod(lambda name, m: "after" if (name, m.kind) == ("silo3", "update") else None)
    with released() as totals:
        run(aggregator, STILL, seed=None, federation=wide(silos))
    known = spec(STILL, silos, 3, WIDE)
    event = aggregator.event(known, aggregator.views(STILL, silos, 3)["released"])
    moved = STILL.clip * (
        1 + np.sqrt(WIDE) / units_of(aggregator)
    )  # the uniform part's shift is charged, too
    assert event.noise_multiplier * moved == pytest.approx(5.0 * 0.5)
    assert judges_std((totals[0] - totals[1]) / np.sqrt(2), event.noise_multiplier * moved)


@BOTH
def test_noise_is_drawn_once_for_all_attempts_at_a_release(aggregator, monkeypatch):
    """Under one release two draws would be two noisy values of one update."""
    drawn: list[str] = []
    for side in (lattice._Silo, paillier._Silo):
        monkeypatch.setattr(
            side,
            "draw_noise",
            lambda self, *of, draw=side.draw_noise: (
                drawn.append(self._context.identity.name) or draw(self, *of)
            ),
        )
    parties = Parties(replace(aggregator, min_silos=3), RECORDS, silos=4)
    parties.transport.lost = lambda name, m: (name, m.kind) == ("silo3", "update")
    parties.run_round(0)
    assert [m.attempt for name, m in parties.transport.asked if (name, m.kind) == ("silo0", "update")] == [
        0,
        1,
    ]
    assert drawn == ["silo0", "silo1", "silo2"]


@BOTH
def test_every_adversary_is_charged_for_shares_that_are_sized_for_the_fewest_silos(aggregator):
    """Shares for 4 of 5 silos have 5/4 of the variance that shares for 5 have, and all five answer."""
    multipliers = {}
    for m in (4, 5):
        few = replace(aggregator, min_silos=m)
        views = few.views(RECORDS, 5)
        events = {name: few.event(spec(RECORDS, 5, m), view) for name, view in views.items()}
        assert events["server"] == events["released"], "the server sees the sum and no counts"
        multipliers[m] = [events[name].noise_multiplier for name in ("released", "server", "silo")]
    np.testing.assert_allclose(np.divide(multipliers[4], multipliers[5]), np.sqrt(5 / 4), rtol=1e-3)


def decrypted_apart(aggregator, monkeypatch) -> list[list[np.ndarray]]:
    """Takes off masks and seals; then gives each silo's own part of every round, in clips."""
    parts: list[list[np.ndarray]] = []
    if aggregator.name == "lattice":
        decrypt, opened, apart = LatticeServer.decrypt, lattice.open_sum, []

        def all_of(values, seals, group):
            apart.append(values)
            return opened(values, {}, group)

        def each(self, total):
            p = self.parameters
            clip = p.clip_units * 2.0**p.weight_bits
            parts.append([decrypt(self, digits) / clip for digits in apart[-1]])
            return decrypt(self, total)

        monkeypatch.setattr(lattice, "apply_masks", lambda value, *_: value)
        monkeypatch.setattr(lattice, "open_sum", all_of)
        monkeypatch.setattr(LatticeServer, "decrypt", each)
    else:
        compute_scaled_sum = PaillierServer.compute_scaled_sum

        def each(self, answers, seals):
            clip = self.parameters.scale * self.parameters.row_bound
            parts.append([np.array([x / clip for x in compute_scaled_sum(self, [a])]) for a in answers])
            return compute_scaled_sum(self, answers)

        monkeypatch.setattr(paillier, "apply_masks", lambda value, *_: value)
        monkeypatch.setattr(PaillierServer, "compute_scaled_sum", each)
    return parts


@BOTH
def test_every_silo_adds_its_own_share_of_the_noise(aggregator, unmoved, monkeypatch):
    parts = decrypted_apart(aggregator, monkeypatch)
    run(aggregator, STILL, seed=None, federation=wide())
    for first, second in zip(*parts, strict=True):
        assert judges_std((first - second) / np.sqrt(2), 5.0 / np.sqrt(3))


@BOTH
def test_the_sum_is_noisy_in_every_residue_of_its_scale(aggregator, unmoved, monkeypatch):
    """Multiples of 2^r, or of C, as noise leave the sum bare modulo that (docs/protocols.md, sections 3 and 4)."""
    residues: list[np.ndarray] = []
    if aggregator.name == "lattice":
        decrypt = LatticeServer.decrypt

        def kept(self, total):
            sums = decrypt(self, total)
            residues.append(
                (sums & ((1 << self.parameters.noise_shift) - 1)) / 2.0**self.parameters.noise_shift
            )
            return sums

        monkeypatch.setattr(LatticeServer, "decrypt", kept)
    else:
        compute_scaled_sum = PaillierServer.compute_scaled_sum

        def kept(self, answers, seals):
            sums, scale = compute_scaled_sum(self, answers, seals), self.parameters.scale
            residues.append(np.array([x % scale for x in sums]) / scale)
            return sums

        monkeypatch.setattr(PaillierServer, "compute_scaled_sum", kept)
    run(aggregator, STILL, seed=None, federation=wide())
    shift = (residues[0] - residues[1]) % 1
    counted = np.histogram(shift, 16, (0, 1))[0]
    assert counted.min() > WIDE / 16 / 2, "of two rounds of one model, the difference is anywhere"


# --- silos that are lost ---


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("kind", "when", "method"),
    [
        ("update", "before", RECORDS),
        ("update", "after", SAMPLED),
        ("open", "before", SAMPLED),
        ("open", "after", RECORDS),
    ],
)
def test_the_others_are_summed_and_charged_as_they_are(aggregator, kind, when, method, wire, tmp_path):  # noqa: F811
    """Lost before seals open: one charge with the survivors' noise. While they open: a second one, and fresh noise."""
    wire.fails = at("silo2", kind, 0, when)
    needs_three, four = replace(aggregator, min_silos=3), small_federation(silos=4)
    with released() as hidden:
        result = run(needs_three, method, federation=four, out=tmp_path / "hidden")
    with released() as clear:
        twin = run(in_clear(needs_three), method, federation=four, out=tmp_path / "clear")
    np.testing.assert_array_equal(hidden, clear)
    assert result.epsilon == twin.epsilon
    spent = charges(tmp_path / "hidden")
    assert [c["events"] for c in spent] == [c["events"] for c in charges(tmp_path / "clear")]
    assert [(c["round"], c["release"]) for c in spent] == [(0, 0)] + [(0, 1)] * (kind == "open") + [(1, 0)]
    if method is RECORDS:
        all_four, three = 5.0 * np.sqrt(4 / 3), 5.0
        expected = [all_four, three, all_four] if kind == "open" else [three, all_four]
        assert multipliers(tmp_path / "hidden") == pytest.approx(expected, rel=1e-3)


@BOTH
def test_silo_0_lost_is_a_silo_like_any_other_where_nobody_is_drawn(aggregator, wire, tmp_path):  # noqa: F811
    wire.fails = at("silo0", "update", 1, "before")
    run(replace(aggregator, min_silos=3), federation=small_federation(silos=4), out=tmp_path)
    assert multipliers(tmp_path) == pytest.approx([5.0 * np.sqrt(4 / 3), 5.0], rel=1e-3)


@pytest.mark.parametrize("when", ["before", "after"])
def test_where_persons_are_drawn_silo_0_must_answer_and_the_run_goes_on_when_it_does(when, wire, tmp_path):  # noqa: F811
    needs_three, four = replace(LATTICE, min_silos=3), small_federation(silos=4)
    whole = run(needs_three, SAMPLED, federation=four)
    wire.fails = at("silo0", "sample", 1, when)
    with pytest.raises(SilodpError, match=r"silo 'silo0' gave no answer.*resume"):
        run(needs_three, SAMPLED, federation=four, out=tmp_path)
    assert len(charges(tmp_path)) == 1, "nothing of the second round was seen"
    wire.fails = staticmethod(lambda name, message: None)
    resumed = run(needs_three, SAMPLED, federation=four, out=tmp_path, resume=True)
    assert torch.equal(resumed.params, whole.params)
    assert resumed.epsilon == whole.epsilon
    assert len(charges(tmp_path)) == 2


def test_attempts_beyond_those_the_encryption_was_chosen_for_are_not_made(wire):  # noqa: F811
    """Every attempt's ciphertexts disclose a little, and flooding is sized for so many."""
    wire.fails = at("silo3", "update", 0, "before")
    two_attempts, four = replace(LATTICE, min_silos=3, attempts=2), small_federation(silos=4)
    assert len(run(two_attempts, rounds=1, federation=four).metrics) == 2
    with pytest.raises(SilodpError, match="has made the 2 attempts its encryption was chosen for"):
        run(two_attempts, rounds=2, federation=four)
