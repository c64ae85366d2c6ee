"""Trained models elsewhere: the public files of a run read back, and predictions for new tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silodp._lazy import export_lazily

if TYPE_CHECKING:
    from silodp.bundle.trained_model import TrainedModel, load

__all__ = ["TrainedModel", "load"]

__getattr__ = export_lazily(__name__, {"trained_model": ("TrainedModel", "load")})
