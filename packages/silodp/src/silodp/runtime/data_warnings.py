"""Warnings about the records of a federation, for their owner alone: keys, few persons, weights, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from silodp.data.federation import Federation
from silodp.data.identity.linkage import find_few_persons, list_linkage_warnings
from silodp.data.silo_data import SiloData
from silodp.methods import FederationSize
from silodp.methods.base import Method

if TYPE_CHECKING:
    from silodp.training.task import Task


def list_data_warnings(federation: Federation, task: Task, method: Method) -> list[str]:
    """Return sentences on keys of persons that may differ, few persons, weights, and a loss that learns from few.

    They have private counts: they are for the owner of the records alone.
    """
    of_keys, warnings = list[str](), list[str]()
    if method.unit == "user":
        of_keys = list_linkage_warnings(federation)
        warnings = of_keys + find_few_persons(federation.silos)
    if not method.releases_model:  # the others are about a model that learns
        return warnings
    silos, keys_differ = len(federation.silos), len(of_keys) > 1
    bounds = method.bounds(FederationSize(silos, federation.users))
    # With uniform weights a silo gives everyone 1/S, also a person who has all their records there.
    is_shared = bounds is not None and bounds.silos_sharing_weight > 1
    if is_shared and not keys_differ and (federation.counts() > 0).sum(0).max() <= 1:
        warnings.append(
            f"every person has records in one silo alone, and weights 'uniform' let it count for 1/{silos}: a model "
            'learns better with method.weighting = "present", which tells the server where persons have records '
            "unless the aggregator hides it"
        )
    return warnings + list_loss_warnings(federation.silos, task.loss.name)


def list_loss_warnings(silos: Sequence[SiloData], loss: str | None) -> list[str]:
    """Return a sentence where the loss is that of Cox (1972), and most persons have too few records in a silo for it.

    The sentence has private counts: it is for the owner of the records alone.
    """
    if loss != "cox":
        return []
    # (2, n): a user, and their number of records in one silo. The partial likelihood of Cox compares a record with
    # others of its batch, and with one record of a person there is nothing to compare.
    users = np.concatenate([np.unique(silo.user, return_counts=True) for silo in silos], axis=1)
    persons, several = len(np.unique(users[0])), len(np.unique(users[0][users[1] > 1]))
    if persons == 0 or 2 * several > persons:
        return []
    return [
        f"{persons - several:,} of {persons:,} persons have no two records in one silo, and the loss of Cox learns "
        "nothing from them: use exponential_survival, which learns from single records (task.loss)"
    ]
