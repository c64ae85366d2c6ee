"""MLflow: the rounds of a run as metrics of one MLflow run, in a local SQLite file or at a tracking server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from silodp.tracking import Tracker, is_local

RUN_TAG = "silodp.run"
"""Tag with the public id of the run, by which a resumed run finds its MLflow run."""
_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""Seconds and repetitions of a request, where the user sets none. MLflow's own (120 and 7) would hold the run for four
minutes at a server that refuses connections. One repetition, as a server closes connections that idle for a long round.
"""


class MLflow(Tracker):
    """Logs metrics; show a local file with `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db`.

    The environment variable MLFLOW_TRACKING_URI is not read: what is sent to a server is decided by the argument alone.
    A server that cannot be reached is given up after 10 seconds at most, unless MLFLOW_HTTP_REQUEST_TIMEOUT (seconds)
    and MLFLOW_HTTP_REQUEST_MAX_RETRIES say otherwise.

    Args:
        target: A folder, in which mlflow.db is made, or the URI of a tracking server or a database; see `Tracker`.
        experiment: Name of the MLflow experiment.
        private: See `Tracker`.

    Raises:
        SilodpError: MLflow is not installed: `pip install 'silodp[mlflow]'`.
    """

    name = "mlflow"
    packages = ("mlflow", "sqlalchemy", "alembic")

    def __init__(
        self, target: str | Path | None = None, *, experiment: str = "silodp", private: bool | None = None
    ) -> None:
        # MLflow reports its use to its makers unless it is asked not to, before it is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        super().__init__(target, private=private)
        self._experiment = experiment
        self._client: Any = None
        self._run = ""

    def log(self, run: str, round_: int, numbers: dict[str, float]) -> None:
        """Log each number with the round as its step."""
        with _limited_waiting():
            if self._client is None:  # not before the run has accepted its settings and its directory
                self._open(run)
            for name, value in numbers.items():
                self._client.log_metric(self._run, name, value, step=round_)

    def close(self) -> None:
        """Mark the MLflow run as finished; it can be continued."""
        if self._client is not None:
            with _limited_waiting():
                self._client.set_terminated(self._run)

    def _open(self, run: str) -> None:
        from mlflow import MlflowClient

        uri, artifacts = self.target, None
        if is_local(uri) and "://" not in uri:
            folder = Path(uri).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", folder.as_uri()
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(self._experiment)
        place = (
            client.create_experiment(self._experiment, artifact_location=artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        found = client.search_runs([place], f"tags.`{RUN_TAG}` = '{run}'", max_results=1)
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
        else:
            found = [client.create_run(place, run_name=run[:8], tags={RUN_TAG: run})]
        self._run, self._client = found[0].info.run_id, client


@contextmanager
def _limited_waiting() -> Iterator[None]:
    """Set `_LIMITS` in the environment, where MLflow reads them at every request, until the end of the block."""
    added = {name: value for name, value in _LIMITS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
