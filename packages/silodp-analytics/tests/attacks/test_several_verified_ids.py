"""Persons with a verified id, and with other ids that nobody links.

Attacked is the bound of a sum where one person has an id that all silos know and another one in every silo: under
weights "primary_silo" each of these ids weighs 1, so that the person moves the sum by 1 + S clips at the ε of one. With
`VerifiedIds` all of a person's ids weigh 1 together.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

import silodp
from silodp.accounting.guarantee import INDEX_VERIFIED_IN_PART, PUBLIC_INDEX
from silodp.accounting.views import View
from silodp.aggregators import Masked, Plain
from silodp.config.resolve import load_config
from silodp.data import Federation, SiloData
from silodp.errors import SilodpError
from silodp.methods import FederationSize, UldpAvg, UldpSgd, VerifiedIds, roles
from silodp.training import Task, squared_error
from silodp_analytics.evaluation.series import Evaluation
from support.specs import make_spec

SILOS, VERIFIED, USERS = 4, 3, 8
SHARE = 0.8
OTHER = np.nextafter((1 - SHARE) / SILOS, 0)


def federate(person: bool) -> Federation:
    """Return silos in which every id has records; the person's are 0 everywhere, and 3 + s in silo s alone."""
    generator = torch.Generator().manual_seed(1)
    silos = []
    for place in range(SILOS):
        x, y = torch.randn(6, 2, generator=generator), torch.randn(6, generator=generator)
        user = np.array([1, 1, 2, 7, 7, 7])
        if person:
            x, y = torch.cat([x, torch.full((3, 2), 9.0)]), torch.cat([y, torch.full((3,), -9.0)])
            user = np.concatenate([user, [0, 0, VERIFIED + place]])
        silos.append(SiloData(f"silo{place}", x.numpy(), y.numpy(), user))
    return Federation(tuple(silos), USERS, None)


def sum_rows(method: UldpSgd, person: bool, aggregator: Plain | Masked) -> np.ndarray:
    """Return the sum of a round, in clips; its noise is far below one."""
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    task = Task(model, squared_error())
    result = silodp.train(federate(person), task, method, rounds=1, seed=3, aggregator=aggregator)
    moved = torch.cat([tensor.flatten() for tensor in result.model.state_dict().values()])
    return moved.double().numpy() * (USERS * SILOS)


@pytest.mark.parametrize("aggregator", [Plain(), Masked()], ids=["plain", "masked"])
@pytest.mark.parametrize("weighting", ["primary_silo", "records", "present"])
def test_all_ids_of_a_person_move_a_sum_by_one_clip_together(weighting, aggregator):
    settings = {"clip": 1.0, "weighting": weighting}
    moved = {}
    for verified in (VerifiedIds(VERIFIED, SHARE), None):
        method = UldpSgd(1e-6, verified=verified, **settings)
        moved[verified] = np.linalg.norm(
            sum_rows(method, True, aggregator) - sum_rows(method, False, aggregator)
        )
    # All of the person's updates have one direction, so the bound is reached. Noise of 10⁻⁶ clips is on both sums.
    assert moved[VerifiedIds(VERIFIED, SHARE)] == pytest.approx(1.0, abs=1e-4)
    assert moved[None] == pytest.approx(1.0 + SILOS, rel=1e-3)


def test_a_server_that_gives_every_other_id_the_weight_of_all_is_refused(monkeypatch):
    """Each silo knows S, so it keeps its part: else a person weighs λ + S·(1 − λ), 5.5 with ten silos and λ = .5."""

    def give_all(self, weights):
        return np.where(np.arange(weights.shape[1]) < self.users, self.share * weights, 1 - self.share)

    method = UldpSgd(1e-6, clip=1.0, weighting="primary_silo", verified=VerifiedIds(VERIFIED, SHARE))
    monkeypatch.setattr(VerifiedIds, "divide", give_all)
    with pytest.raises(SilodpError) as refused:
        sum_rows(method, True, Plain())
    assert refused.value.code == "gate.allotment"
    # What the sum would move by, where one clip is charged.
    monkeypatch.setattr(VerifiedIds, "check", lambda self, weights, silos: None)
    moved = np.linalg.norm(sum_rows(method, True, Plain()) - sum_rows(method, False, Plain()))
    assert moved == pytest.approx(SHARE + SILOS * (1 - SHARE), rel=1e-3)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8, 0.95, 1 - 1e-9])
@pytest.mark.parametrize("silos", [1, 2, 3, 6, 7, 20, 49, 50, 1000])
def test_weights_of_a_person_never_add_to_more_than_one(silos, share):
    """In exact arithmetic: the sum of the floating-point weights themselves."""
    counts = np.ones((silos, 3), dtype=np.int64)
    method = UldpAvg(1.0, weighting="primary_silo", verified=VerifiedIds(1, share))
    weights = roles.compute_user_weights(method, counts, FederationSize(silos, 3))
    total = sum(map(Fraction, weights[:, 0].tolist())) + sum(map(Fraction, weights[:, 2].tolist()))
    assert 1 - Fraction(1, 10**12) < total <= 1
    for silo, one in zip(weights, counts, strict=True):
        assert method.check_weights(silo, one, FederationSize(silos, 3)) is None


@pytest.mark.parametrize(
    ("sent", "wrong"),
    [
        ([SHARE, 0.0, OTHER], None),
        ([1.0, 0.0, OTHER], "verified.share"),
        ([0.5, 0.0, OTHER], "neither"),
        ([SHARE, 0.0, np.nextafter(OTHER, 1)], "verified.share"),
        ([SHARE, 0.0, 1 - SHARE], "verified.share"),
        ([SHARE, OTHER, OTHER], "no record"),
    ],
)
def test_a_silo_refuses_weights_of_verified_and_of_other_ids(sent, wrong):
    method = UldpAvg(1.0, weighting="primary_silo", verified=VerifiedIds(2, SHARE))
    found = method.check_weights(np.array(sent), np.array([2, 0, 1]), FederationSize(SILOS, 3))
    assert (found is None) if wrong is None else wrong in str(found)


def test_the_event_is_that_of_other_weights_that_depend_on_records():
    primary = UldpAvg(5.0, weighting="primary_silo")
    verified = UldpAvg(5.0, weighting="primary_silo", verified=VerifiedIds(3))
    for view in (View("released", 4), View("silo", 4), View("server", 4)):
        assert verified.dp_event(view) == primary.dp_event(view)
    cases = verified.linkage_cases(verified.dp_event(View("released", 4)), View("released", 4))
    noise = {
        case.case: case.event.noise_multiplier for case in cases if hasattr(case.event, "noise_multiplier")
    }
    assert noise["two verified ids"] == pytest.approx(5 / 1.9)
    assert noise["a verified id, and two others in every silo"] == pytest.approx(5 / 1.1)


def test_a_guarantee_assumes_no_single_id_for_a_person():
    """Who signs that every silo knows a person by the same id would sign what the run does not need, and is false."""
    settings = {"weighting": "primary_silo", "verified": VerifiedIds(VERIFIED)}
    task = Task(torch.nn.Linear(2, 1), squared_error())
    result = silodp.train(federate(True), task, UldpSgd(5.0, **settings), rounds=1, seed=1)
    assumed = result.guarantees["released"].assumptions
    assert INDEX_VERIFIED_IN_PART in assumed
    assert PUBLIC_INDEX not in assumed
    assert any(one.id == "verified-ids" and f"the first {VERIFIED} ids" in one.text for one in assumed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weighting": "uniform"},
        {"weighting": "primary_silo", "user_sampling": 0.5},
        {"weighting": "primary_silo", "verified": {"users": 2, "share": 1.0}},
        {"weighting": "primary_silo", "verified": {"users": 0}},
    ],
)
def test_what_is_not_proven_is_refused(wrong):
    settings = {"verified": {"users": 2}} | wrong
    with pytest.raises(SilodpError):
        UldpAvg(1.0, **(settings | {"verified": VerifiedIds(**settings["verified"])}))


def test_a_run_refuses_more_verified_ids_than_users():
    task = Task(torch.nn.Linear(2, 1), squared_error())
    many = UldpSgd(5.0, weighting="primary_silo", verified=VerifiedIds(USERS + 1))
    with pytest.raises(SilodpError) as refused:
        silodp.train(federate(True), task, many, rounds=1, seed=1)
    assert refused.value.code == "argument.value"


def test_an_evaluation_by_sums_is_refused_since_it_counts_every_id_as_a_person():
    some = UldpSgd(5.0, weighting="primary_silo", verified=VerifiedIds(VERIFIED))
    spec = make_spec("run", ("a", "b"), some, FederationSize(2, USERS), 1)
    spec = replace(spec, series=(Evaluation("sums", noise_multiplier=5.0),))
    with pytest.raises(SilodpError) as refused:
        spec.derived["evaluation"]
    assert refused.value.code == "evaluation.unit"


def test_a_configuration_names_verified_ids(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        'rounds = 1\n[data]\nsource = "embedded"\nusers = 20\nsilos = 3\n[method]\nname = "uldp-avg"\n'
        'noise_multiplier = 5.0\nweighting = "primary_silo"\nverified = { users = 15, share = 0.7 }\n'
    )
    assert load_config(path).method.verified == VerifiedIds(15, 0.7)
