"""TensorBoard: the rounds of a run as event files in a folder, through torch.utils.tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from silodp.tracking import Tracker


class TensorBoard(Tracker):
    """Writes event files; show them with `tensorboard --logdir FOLDER`.

    Args:
        target: The folder for the event files, to which a resumed run adds; see `Tracker`.
        private: See `Tracker`.

    Raises:
        SilodpError: TensorBoard is not installed: `pip install 'silodp[tensorboard]'`.
    """

    name = "tensorboard"
    packages = ("tensorboard", "torch.utils.tensorboard")

    def __init__(self, target: str | Path | None = None, *, private: bool | None = None) -> None:
        super().__init__(target, private=private)
        self._writer: Any = None

    def log(self, run: str, round_: int, numbers: dict[str, float]) -> None:
        """Add a point to the curve of each number."""
        if self._writer is None:  # not before the run has accepted its settings and its directory
            from torch.utils.tensorboard import SummaryWriter

            # A repeated round takes the place of what was logged of it and of later rounds.
            self._writer = SummaryWriter(self.target, purge_step=round_ or None)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round_)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
