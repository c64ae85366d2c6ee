#!/usr/bin/env bash
# pfl 0.6.0: the user sampler "random" draws a user several times into one cohort, and "minimize_reuse" takes users in turn.
#
# The accountants beside them (`sampling_probability`) count Poisson samples, in which a user is at most once in a cohort,
# and in each by a coin of its own. Of 100 users in 95 cohorts of 10, "random" had a user 3 times in one cohort; under
# "minimize_reuse" nobody was drawn again before all others had been, so no cohort hides who is in it.
# Seen: "random: up to 3 times in a cohort; minimize_reuse: 100 of 100 users in the first ten cohorts".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check \
  pfl==0.6.0 prv-accountant==0.2.0 dp-accounting==0.5.1 'numpy<3' 'scipy<2'
"$work/env/bin/python" - <<'PY'
from collections import Counter

import numpy as np
from pfl.data.sampling import get_user_sampler

np.random.seed(0)
draw = get_user_sampler("random", list(range(100)))
cohorts = [[draw() for _ in range(10)] for _ in range(95)]
most = max(Counter(cohort).most_common(1)[0][1] for cohort in cohorts)
draw = get_user_sampler("minimize_reuse", list(range(100)))
first = len({draw() for _ in range(100)})
print(f"random: up to {most} times in a cohort; minimize_reuse: {first} of 100 users in the first ten cohorts")
assert most > 1 and first == 100, "changed"
PY
