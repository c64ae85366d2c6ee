"""Local SGD of many users or records at once."""

from silodp.training.sgd.local import LocalTraining, silo_update, user_updates
from silodp.training.sgd.records import RecordGradients, record_gradients

__all__ = ["LocalTraining", "RecordGradients", "record_gradients", "silo_update", "user_updates"]
