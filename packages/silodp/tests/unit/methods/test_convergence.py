"""The paper's convergence bound (ULDP-FL, Theorem 6) has |S| on the wrong side of its first term."""

import math

import numpy as np
import torch

from silodp.data.federation import Federation, SiloData
from silodp.methods import UldpAvg
from silodp.runtime.train import train
from silodp.training.losses import squared_error
from silodp.training.sgd.local import LocalTraining
from silodp.training.task import Task


def test_theorem_6_as_printed_is_broken_by_a_parabola_and_holds_with_the_factor_mended():
    """f(w) = (w − 1)²/2 in every silo, one person, no noise, no clipping: all terms but the first are zero.

    From (17) to (18) the proof replaces 1/ᾱ ≤ |S|/C̲ by 1/(|S|·C̲): the first term must read
    |S|·(f(x₀) − f*)/(c·T·η_g·η_l·Q), |S|² times what is printed. (Remark 2's advice for η_g fits the mended one.)
    """
    silos, rounds, local_rate, rate = 20, 10, 0.01, 1 / 30  # rate = η_g·η_l·Q·ᾱ ≤ 1/(3L), ᾱ = 1/S, L = Q = 1
    server_rate = rate * silos / local_rate
    x, user = np.full((1, 1), math.sqrt(0.5), np.float32), np.zeros(1, np.int64)
    federation = Federation(
        tuple(SiloData(f"silo{s}", x, x[0], user) for s in range(silos)), users=1, test=None
    )
    task = Task(torch.nn.Linear(1, 1, bias=False).double(), squared_error())
    method = UldpAvg(0.0, 1e6, LocalTraining(learning_rate=local_rate), server_learning_rate=server_rate)
    start = task.initial(0).item() - 1

    end = train(federation, task, method, rounds=rounds, seed=0).params.item() - 1
    np.testing.assert_allclose(
        end, start * (1 - rate) ** rounds, rtol=1e-6
    )  # each round shrinks w − 1 by `rate`

    squared_gradients = np.mean([(start * (1 - rate) ** t) ** 2 for t in range(rounds)])
    c = 0.5 - 15 * local_rate**2  # the largest constant that the proof allows
    printed = (start**2 / 2) / (c * rounds * server_rate * local_rate * silos)
    assert squared_gradients > 50 * printed
    assert squared_gradients <= printed * silos**2
