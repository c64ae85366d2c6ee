"""Table 1 of the DDP paper, and what of it is proven."""

import pytest

from silodp.accounting.events import CorrelatedReleases, Gaussian, PoissonSampled
from silodp_experiments.averaged_models import PARTIES, compute_table, list_charges

# DDP, Table 1: by the paper's conversion (as printed there), RDP, PLD, for 1, 2, 5, 10 parties.
TABLE = {
    1: [(5.0, 4.25, 3.67), (2.78, 2.23, 1.78), (1.22, 0.904, 0.634), (0.64, 0.440, 0.311)],
    10: [(5.0, 4.25, 3.53), (2.61, 2.12, 1.75), (1.19, 0.924, 0.788), (0.72, 0.545, 0.476)],
    50: [(5.0, 4.31, 3.79), (2.85, 2.41, 2.15), (1.55, 1.269, 1.143), (1.03, 0.824, 0.744)],
}


@pytest.fixture(scope="module")
def rows():
    return {(row.steps, row.parties, row.trajectory, row.conversion): row for row in compute_table()}


@pytest.mark.slow
def test_the_papers_column_and_ours(rows):
    for steps, cells in TABLE.items():
        for parties, (paper, rdp, pld) in zip(PARTIES, cells, strict=True):
            found = [rows[steps, parties, "paper", c].epsilon for c in ("paper", "rdp", "pld")]
            assert found == [
                pytest.approx(paper, abs=0.03),
                pytest.approx(rdp, abs=0.02),
                pytest.approx(pld, abs=0.02),
            ]


def test_what_nobody_has_proven_is_called_claimed(rows):
    claimed = {key for key, row in rows.items() if row.status == "claimed"}
    assert len(rows) == 3 * 3 * 3 * 4
    assert claimed == {key for key in rows if key[2] == "paper" and key[0] > 1 and key[1] > 1}


def test_proven_epsilons_are_no_smaller_than_the_claimed_ones(rows):
    for (steps, parties, trajectory, conversion), row in rows.items():
        claimed = rows[steps, parties, "paper", conversion].epsilon
        assert row.epsilon >= claimed * (1 - 1e-9)
        if steps == 1:
            assert row.epsilon == claimed
        if trajectory == "local" and steps > 1:
            alone = rows[steps, 1, "paper", conversion].epsilon
            assert 0.9 * alone <= row.epsilon <= alone
    assert rows[10, 10, "local", "pld"].epsilon > 5 * rows[10, 10, "decoupled", "pld"].epsilon


def test_only_the_last_step_is_free_of_the_trajectory():
    looks = CorrelatedReleases(Gaussian(4.0), Gaussian(2.0))
    assert list_charges("decoupled", 9, 1.0, 2.0) == [
        (PoissonSampled(0.1, looks), 8),
        (PoissonSampled(0.1, Gaussian(2.0)), 1),
    ]
    assert list_charges("local", 9, 1.0, 2.0)[0] == (PoissonSampled(0.1, Gaussian(1.0)), 8)
    assert list_charges("paper", 9, 1.0, 2.0)[0] == (PoissonSampled(0.1, Gaussian(2.0)), 8)
