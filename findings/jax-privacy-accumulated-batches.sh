#!/usr/bin/env bash
# jax_privacy 2.0.0: `DPKerasConfig` accepts a noise multiplier that its own calibration counts at another batch size.
#
# 6,400 records, batches of 64, ten of them accumulated in an update, 1,000 updates, noise multiplier 1, ε = 1.83. The
# configuration is accepted (1.829 is the ε of batches of 64). The rule by which jax_privacy chooses a noise multiplier
# where none is given counts the 640 records of an update: ε = 25.2. And `poisson_sampling_in_fit` is False where nothing
# is said, while both numbers are for Poisson samples. Seen: "accepted for 1.83; counted 25.2; Poisson by default: False".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check \
  jax_privacy==2.0.0 jax==0.10.2 jaxlib==0.10.2 keras==3.15.1 dp-accounting==0.6.0
KERAS_BACKEND=jax "$work/env/bin/python" - <<'PY'
from jax_privacy import accounting, keras_api

config = keras_api.DPKerasConfig(
    epsilon=1.83, delta=1e-5, clipping_norm=1.0, batch_size=64, gradient_accumulation_steps=10,
    train_steps=1000, train_size=6400, noise_multiplier=1.0,
)
params = accounting.DpParams(
    noise_multipliers=1.0, batch_size=config.effective_batch_size, num_samples=6400, delta=1e-5
)
counted = keras_api.DPKerasConfig._accountant.compute_epsilon(1000, params)
print(f"accepted for {config.epsilon}; counted {counted:.1f}; Poisson by default: {config.poisson_sampling_in_fit}")
assert counted > 20 and config.poisson_sampling_in_fit is False, "changed"
PY
