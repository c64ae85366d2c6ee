"""What the guarantee of an average says that it rests on."""

import torch

from silodp_experiments.model_averaging import average_models


def test_adaptive_steps_are_said_not_to_pool_noise():
    """Adam divides by what it has seen: the noise of several parties is then no longer one Gaussian in the mean."""
    averaged = average_models(
        [torch.ones(2), torch.zeros(2)], noise_multiplier=2.0, local_steps=3, record_sampling=0.1, delta=1e-5
    )
    (said,) = [one.text for one in averaged.guarantee.assumptions if one.id == "one-public-start"]
    assert "an adaptive optimizer (Adam)" in said
    assert "would not let the parties' noise add up" in said
