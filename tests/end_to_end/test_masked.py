"""Secure aggregation in whole runs: what is summed, what is charged, what the server sees, what silos refuse."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import NonPrivate, PoissonSampled, RevealedSample, Skellam
from silodp.accounting.views import View
from silodp.aggregators import masked
from silodp.aggregators.masked import Masked
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import clip_rows
from silodp.mechanisms.quantization import Quantizer, compute_noise_variance
from silodp.methods import UldpSgd
from silodp.runtime.server import Server
from silodp.wire.messages import Message
from silodp_experiments.uldp_baselines import Default, UldpGroup, UldpNaive
from support.clear import MaskedInClear, described
from support.masked import AVG, TRAIN, charges, multipliers, run, spec, uniform
from support.oracles import judges_std
from support.wires import Wire, wire  # noqa: F401

METHODS = [
    AVG,
    replace(AVG, user_sampling=0.5),
    replace(AVG, weighting="records", server_momentum=0.3),
    UldpSgd(5.0, 0.5),
    UldpNaive(5.0, 0.5, TRAIN),
    UldpGroup(2.0, 0.5, 4, 0.2, local_steps=3, expected_batch_size=4, local_learning_rate=0.5),
    Default(TRAIN),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name}-{getattr(m, 'user_sampling', '')}")
def test_the_masked_sums_are_the_sums_in_clear_bit_for_bit(method):
    hidden, clear = run("masked", method), run(MaskedInClear(), method)
    assert described(hidden) == described(clear)


def test_integers_stay_near_the_floating_sums():
    exact = replace(AVG, noise_multiplier=0.0)
    integers, floats = run("masked", exact).params, run("plain", exact).params
    torch.testing.assert_close(integers, floats, rtol=1e-4, atol=1e-4)


def released(monkeypatch, aggregator, method, rounds, **more) -> np.ndarray:
    totals: list[np.ndarray] = []
    play = Server.run_round

    def watched(self, round_, params, *state):
        total = play(self, round_, params, *state)
        totals.append(total.numpy())
        return total * 0  # the model stays where it is, so that rounds repeat one another but for the noise

    monkeypatch.setattr(Server, "run_round", watched)
    run(aggregator, method, rounds, seed=None, **more)
    return np.array(totals)


@pytest.mark.parametrize("method", [AVG, UldpNaive(5.0, 0.5, TRAIN)], ids=lambda m: m.name)
@pytest.mark.slow
def test_the_noise_in_a_sum_is_the_noise_that_is_charged(method, monkeypatch):
    """σ is accepted, 2σ/3 and 3σ/2 are not, on the sums that the server releases."""
    still = replace(method, local=replace(TRAIN, batch_size=None))
    totals = released(monkeypatch, "masked", still, 120)
    noise = (totals - totals.mean(axis=0)).ravel() / np.sqrt(1 - 1 / 120)
    event = Masked().event(spec(still), Masked().views(still, 3)["released"])
    assert isinstance(event, Skellam)
    sensitivity = 0.5 if method is AVG else 0.5 * 2 * 3
    assert judges_std(noise, event.noise_multiplier * sensitivity)


@pytest.mark.slow
def test_shares_are_sized_for_the_survivors_that_are_charged(monkeypatch, wire):  # noqa: F811
    """m = 3 of 4: with all four the sum carries more noise, with three exactly σ clips, and the ledger knows which."""
    wire.fails = staticmethod(
        lambda name, request: "before" if name == "silo3" and request.kind == "update" else None
    )
    still = replace(AVG, local=replace(TRAIN, batch_size=None))
    totals = released(monkeypatch, Masked(min_silos=3), still, 120, silos=4)
    noise = (totals - totals.mean(axis=0)).ravel() / np.sqrt(1 - 1 / 120)
    assert judges_std(noise, 5.0 * 0.5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_silo_lost_before_seals_open_costs_one_charge_with_the_survivors_noise(when, wire, tmp_path):  # noqa: F811
    def fails(name, request):
        return when if (name, request.kind, request.round) == ("silo1", "update", 1) else None

    wire.fails = staticmethod(fails)
    result = run(Masked(min_silos=3), rounds=3, silos=4, out=tmp_path)
    # Three of four silos move by 3/4 of the clip: fewer grid steps, and more noise for each of them.
    four, three = 5.0 * np.sqrt(4 / 3), 5.0 / (3 / 4)
    assert multipliers(tmp_path) == pytest.approx([four, three, four])
    units = Masked(min_silos=3).event(spec(AVG, 4, 3), View("released", 4, noise_sized_for=3)).units
    assert charges(tmp_path)[1]["events"]["released"]["units"] == units * 3 // 4
    expected = compute_epsilon(
        [(Skellam(four, units, 5), 2), (Skellam(three, units * 3 // 4, 5), 1)], 1e-5, "rdp"
    )
    assert result.epsilon == pytest.approx(expected)
    # Had the silo dropped out because of what it saw, the round would cost what it costs with all four.
    cap = result.guarantees["released"].any_dropouts
    assert cap == pytest.approx(compute_epsilon([(Skellam(four, units * 3 // 4, 5), 3)], 1e-5, "rdp"))
    assert cap > result.epsilon


@pytest.mark.parametrize("n", [3, 5, 7, 10])
def test_integers_of_n_silos_move_by_no_more_than_is_charged(n):
    """Uniform weights over 10 silos; every silo has the person's whole clip in one coordinate."""
    known = spec(AVG, 10, 3)
    event = Masked(min_silos=3).event(known, View("released", 10, noise_sized_for=3, survivors=n))
    grid = Quantizer.from_bounds(known.bounds)
    clipped = clip_rows(
        torch.zeros(1, dtype=torch.int64), torch.tensor([[9.0, 0, 0, 0, 0]]), known.bounds.clip
    )
    moved = n * np.linalg.norm(grid.truncate(clipped, torch.tensor([1 / 10], dtype=torch.float64)))
    assert moved > n * (grid.units // 10 - 1)
    noise = math.sqrt(n * compute_noise_variance(known.bounds, grid))
    assert event.noise_multiplier <= noise / moved
    assert event.noise_multiplier == pytest.approx(noise / moved, rel=1e-3)
    assert event.units == grid.units * n // 10


def test_the_survivors_send_the_same_noisy_integers_again(wire, tmp_path):  # noqa: F811
    """Fresh noise for an attempt of which nothing was seen would be a second look for one charge."""
    drawn: dict[tuple[str, int], int] = {}
    noisy = masked._Silo._draw_noisy

    def counted(self, work, release):
        key = (self._member.identity.name, len(drawn) // 4)
        drawn[key] = drawn.get(key, 0) + 1
        return noisy(self, work, release)

    wire.fails = staticmethod(
        lambda name, request: "after" if (name, request.kind) == ("silo3", "update") else None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked._Silo, "_draw_noisy", counted)
        run(Masked(min_silos=3), rounds=2, silos=4, out=tmp_path)
    assert set(drawn.values()) == {1}
    assert len(charges(tmp_path)) == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_silo_lost_while_seals_open_costs_a_second_charge_and_fresh_noise(when, wire, tmp_path):  # noqa: F811
    def fails(name, request):
        return when if (name, request.kind, request.round) == ("silo2", "open", 0) else None

    wire.fails = staticmethod(fails)
    result = run(Masked(min_silos=3), rounds=1, silos=4, seed=None, out=tmp_path)
    assert [(c["round"], c["release"]) for c in charges(tmp_path)] == [(0, 0), (0, 1)]
    assert multipliers(tmp_path) == pytest.approx([5 * np.sqrt(4 / 3), 5.0 * 4 / 3])
    assert result.guarantees["released"].rounds == 1
    kept = sorted((tmp_path / "checkpoint" / "silos" / "000").glob("*noisy*"))
    assert len(kept) == 2
    first, second = (Message.decode(unsealed(path)).arrays["noisy"] for path in kept)
    assert not np.array_equal(first, second)


def test_a_second_release_of_one_sample_is_charged_without_amplification(wire, tmp_path):  # noqa: F811
    """Everyone knows that the sample is the same: two samples, known or not, would cost less than what is seen."""
    wire.fails = staticmethod(
        lambda name, request: "after" if (name, request.kind, request.round) == ("silo2", "open", 0) else None
    )
    result = run(Masked(min_silos=3), replace(AVG, user_sampling=0.3), rounds=1, silos=4, out=tmp_path)
    for adversary, kind in (("server", "PoissonSampled"), ("silo", "KnownSample")):
        first, second = (charge["events"][adversary] for charge in charges(tmp_path))
        assert first["kind"] == kind
        assert second["kind"] == "Skellam"
        stated = result.guarantees[adversary]
        assert stated.any_dropouts >= stated.epsilon, "which silos answered may depend on what was seen"


def test_a_curious_silo_is_charged_in_the_steps_of_one_silos_share():
    """What it does not know may move by one S-th of the clip, and so few steps cost more."""
    views = Masked().views(AVG, 3)
    silo, released = (Masked().event(spec(AVG), views[name]) for name in ("silo", "released"))
    assert silo.units == released.units // 3


def test_a_second_release_with_new_draws_of_records_is_charged_as_the_first(wire, tmp_path):  # noqa: F811
    """Records are drawn, and noise is, inside the silo and anew for every release: two independent ones."""
    wire.fails = staticmethod(
        lambda name, request: "after" if (name, request.kind, request.round) == ("silo2", "open", 0) else None
    )
    group = UldpGroup(2.0, 0.5, 4, 0.2, local_steps=3, expected_batch_size=4, local_learning_rate=0.5)
    run(Masked(min_silos=3), group, rounds=1, silos=4, out=tmp_path)
    first, second = charges(tmp_path)
    assert first["events"] == second["events"]
    kept = sorted((tmp_path / "checkpoint" / "silos" / "000").glob("*noisy*"))
    one, other = (Message.decode(unsealed(path)).arrays["noisy"] for path in kept)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("died", ["after charging", "after opening"])
def test_a_run_that_died_goes_on_though_a_silo_is_gone_at_resume(died, wire, tmp_path, monkeypatch):  # noqa: F811
    """Its release was charged, and may have been opened: the others begin a further one."""

    def dies(name, request):
        if request.kind == "open" and request.round == 1 and (died == "after charging" or name == "silo3"):
            raise KeyboardInterrupt
        return None

    wire.fails = staticmethod(dies)
    with pytest.raises(KeyboardInterrupt):
        run(Masked(min_silos=3), rounds=3, silos=4, out=tmp_path)
    wire.fails = staticmethod(
        lambda name, request: "before" if (name, request.round) == ("silo3", 1) else None
    )
    result = run(Masked(min_silos=3), rounds=3, silos=4, out=tmp_path, resume=True)
    assert [(c["round"], c["release"]) for c in charges(tmp_path)] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert result.guarantees["released"].rounds == 3


def test_a_run_that_died_in_a_further_attempt_goes_on_with_it(wire, tmp_path):  # noqa: F811
    """Asked for its first attempt again, silos would refuse to open it, and the run could not go on."""

    def dies(name, request):
        if request.kind == "open" and request.round == 1:
            raise KeyboardInterrupt
        return "before" if (name, request.kind, request.round) == ("silo3", "update", 1) else None

    wire.fails = staticmethod(dies)
    with pytest.raises(KeyboardInterrupt):
        run(Masked(min_silos=3), rounds=2, silos=4, out=tmp_path)
    wire.fails = staticmethod(lambda name, request: None)
    result = run(Masked(min_silos=3), rounds=2, silos=4, out=tmp_path, resume=True)
    assert [(c["round"], c["release"]) for c in charges(tmp_path)] == [(0, 0), (1, 0)]
    assert result.guarantees["released"].rounds == 2


def test_a_further_release_beyond_the_budget_is_not_asked_for(wire, tmp_path):  # noqa: F811
    """Else silos would charge in their ledgers what is never opened."""
    aggregator = Masked(min_silos=3)
    event = aggregator.event(spec(AVG, 4, 3), aggregator.views(AVG, 4)["released"])
    once = compute_epsilon([(event, 1)], 1e-5, "rdp")
    wire.fails = staticmethod(lambda name, m: "before" if (name, m.kind) == ("silo3", "open") else None)
    result = run(aggregator, silos=4, out=tmp_path, budget={"epsilon": 1.01 * once, "delta": 1e-5})
    assert result.stopped == "budget"
    ledgers = (tmp_path / "checkpoint/silo_ledgers").iterdir()
    asked = [path.read_text().count('"kind":"charge"') for path in ledgers]
    assert [len(charges(tmp_path)), *asked] == [1] * 5


def unsealed(path) -> bytes:
    return path.read_bytes()[32:]


def test_too_few_survivors_stop_the_run_which_then_goes_on(wire, tmp_path):  # noqa: F811
    whole = run(rounds=3)
    wire.fails = staticmethod(
        lambda name, request: "before" if request.round == 1 and name == "silo1" else None
    )
    with pytest.raises(SilodpError, match=r"2 silos left and needs 3.*silo1"):
        run(rounds=3, out=tmp_path)
    assert len(charges(tmp_path)) == 1, "nothing of the second round was seen"
    wire.fails = staticmethod(lambda name, request: None)
    resumed = run(rounds=3, out=tmp_path, resume=True)
    assert torch.equal(resumed.params, whole.params)


@pytest.mark.slow
def test_what_the_server_receives_says_nothing_of_one_silo(wire):  # noqa: F811
    """Late answers included: masked vectors are uniform, and so is the difference of any two attempts."""
    wire.fails = staticmethod(
        lambda name, request: "after" if (name, request.kind) == ("silo1", "update") else None
    )
    quiet = replace(AVG, noise_multiplier=0.0)  # nothing but masks to hide behind
    run(Masked(min_silos=3), quiet, rounds=60, silos=4)
    sent: dict[tuple[str, int, int], np.ndarray] = {}
    for name, message in wire.received:
        if message.kind == "update":
            assert set(message.arrays) == {"masked"}
            assert not message.blobs
            sent[name, message.round, message.attempt] = message.arrays["masked"]
    for name in ("silo0", "silo1"):
        assert uniform(np.concatenate([v for (n, _, _), v in sent.items() if n == name]))
    again = [sent["silo0", r, 0] - sent["silo0", r, 1] for r in range(60)]
    assert uniform(np.concatenate(again))
    late = [
        sent["silo0", r, 0] + sent["silo1", r, 0] + sent["silo2", r, 0] + sent["silo3", r, 0]
        for r in range(60)
    ]
    survivors = [sum(sent[f"silo{s}", r, 1] for s in (0, 2, 3)) for r in range(60)]
    assert uniform(np.concatenate(late) - np.concatenate(survivors)), "the late silo's part stays sealed"


def test_sums_need_three_silos_and_a_grid():
    with pytest.raises(SilodpError, match=r"min_silos = 2 of 4"):
        run(Masked(min_silos=2), silos=4)
    with pytest.raises(SilodpError, match=r"min_silos = 5 of 4"):
        run(Masked(min_silos=5), silos=4)
    with pytest.raises(SilodpError, match=r"steps to the clip"):
        run(Masked(units=1 << 8))
    with pytest.raises(SilodpError, match=r"smaller noise_multiplier"):
        run("masked", replace(AVG, noise_multiplier=1e6))


def test_integer_noise_is_accounted_by_renyi_orders_only():
    assert run("masked", rounds=1).guarantees["released"].accountant == "rdp"
    with pytest.raises(SilodpError, match="choose 'rdp'"):
        run("masked", rounds=1, accountant="pld")


def test_views_under_secure_aggregation():
    views = Masked(min_silos=4).views(replace(AVG, user_sampling=0.5), 5, survivors=4)
    sampled = replace(AVG, user_sampling=0.5)
    events = {name: Masked(min_silos=4).event(spec(sampled, 5, 4), view) for name, view in views.items()}
    assert events["server"] == events["released"]
    assert events["server"] == PoissonSampled(
        0.5, Skellam(pytest.approx(5.0 / (4 / 5)), (1 << 18) * 4 // 5, 5)
    )
    assert isinstance(events["silo"], RevealedSample)
    # Four shares sized for four, none of them the curious silo's; a person moves their sum by 4/5 of the clip at most.
    assert events["silo"].event.noise_multiplier == pytest.approx(5.0 / (4 / 5))
    records = replace(AVG, weighting="records")
    told = Masked().views(records, 5)
    assert isinstance(Masked().event(spec(records, 5), told["server"]), NonPrivate)


def test_bytes_are_counted_per_round():
    rows = run("masked", rounds=2).metrics
    assert "bytes" not in rows[0]
    for row in rows[1:]:
        assert row["bytes"]["up"] > 3 * (5 * 4 + 32 + 2 * 64), "words, seals and signatures of three silos"
        assert row["bytes"]["down"] > 3 * 5 * 4
