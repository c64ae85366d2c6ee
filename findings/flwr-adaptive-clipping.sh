#!/usr/bin/env bash
# flwr 1.42.0: adaptive clipping on the server moves the norm away from its target quantile.
#
# Andrew et al. 2021 update the norm by C·exp(−η(b − γ)), where b is the share of updates that are NOT clipped. flwr's
# `DifferentialPrivacyServerSideAdaptiveClipping` counts those that are clipped and keeps the sign. With 20 clients whose
# updates all have norm 10, 30 rounds took the norm from .1 down to about .005 (all are clipped, and it should grow), and
# from 100 up to about 2,000 (none is, and it should fall). Seen: "0.1 -> 0.00499, 100 -> 2135"; noise changes the last digits.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check flwr==1.42.0 dp-accounting==0.6.0
"$work/env/bin/python" - <<'PY'
import logging

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.disable(logging.CRITICAL)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
CLIENTS, ROUNDS = 20, 30


def record(values):
    return ArrayRecord({"w": Array(np.asarray(values))})


def reply(values):
    ask = Message(RecordDict({"arrays": record(values)}), dst_node_id=1, message_type="train")
    content = RecordDict({"arrays": record(values), "metrics": MetricRecord({"num-examples": 1.0})})
    return Message(content, reply_to=ask)


def run(norm):
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, CLIENTS, norm)
    for number in range(ROUNDS):
        strategy.current_arrays = record(np.zeros(4))
        strategy.aggregate_train(number + 1, [reply(np.full(4, 5.0)) for _ in range(CLIENTS)])
    return strategy.clipping_norm


small, large = run(0.1), run(100.0)
print(f"0.1 -> {small:.3g}, 100 -> {large:.4g}")
assert small < 0.05 and large > 500, "changed: the norm should approach 10 from both sides"
PY
