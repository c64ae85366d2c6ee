#!/usr/bin/env bash
# pfl 0.6.0 with prv-accountant 0.2.0: `PRVPrivacyAccountant` takes the scale of Laplace noise for its inverse.
#
# One release of a count (sensitivity 1) with Laplace noise of scale .2 has ε = 1/.2 = 5 in closed form. pfl's PLD
# accountant says 4.99998; its PRV accountant says .196 for the same arguments. It passes `noise_parameter` on as `mu` of
# prv-accountant's `LaplaceMechanism`, which is 1/scale there. Seen: "pld 4.99998, prv 0.196".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check \
  pfl==0.6.0 prv-accountant==0.2.0 dp-accounting==0.5.1 'numpy<3' 'scipy<2'
"$work/env/bin/python" - <<'PY'
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant, PRVPrivacyAccountant

arguments = dict(
    num_compositions=1, sampling_probability=1.0, mechanism="laplace", noise_parameter=0.2, delta=1e-5
)
pld, prv = (kind(**arguments).epsilon for kind in (PLDPrivacyAccountant, PRVPrivacyAccountant))
print(f"pld {pld:.5f}, prv {prv:.3f}")
assert abs(pld - 5) < 0.001 and prv < 0.3, "changed: both should be about 5"
PY
