"""MLflow: the server of MLFLOW_TRACKING_URI, or `mlflow.db` and `mlartifacts/` in the current directory."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from novarl.observe.trackers.system import load
from novarl.observe.trackers.tracker import About

TAG = "novarl.id"
_PARAMS = 100
"""Parameters in one request."""
_LONGEST = 6000
"""Characters of a parameter."""
_NOT_ALLOWED = re.compile(r"[^\w\-. /:]")
_ENDS = {"done": "FINISHED", "stopped": "KILLED", "unsaved": "FAILED", "failed": "FAILED"}


class MlflowTracker:
    """One run in MLflow."""

    def start(self, about: About) -> None:
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # after the import, which sets it
            logging.getLogger(name).setLevel(logging.WARNING)
        self._entities = entities
        given = os.environ.get("MLFLOW_TRACKING_URI")
        here = Path.cwd()
        # The model registry is not used, and small installations have none in SQLite.
        self._client = MlflowClient(given or f"sqlite:///{here}/mlflow.db", given or f"file:{here}/mlruns")
        experiment = self._client.get_experiment_by_name(about.project)
        if experiment is None:
            place = None if given else (here / "mlartifacts").as_uri()
            number = self._client.create_experiment(about.project, artifact_location=place)
        else:
            number = experiment.experiment_id
        earlier = self._client.search_runs([number], f"tags.`{TAG}` = '{about.id}'", max_results=1)
        found = earlier[0] if earlier else self._client.create_run(number, run_name=about.name, tags={TAG: about.id})
        self._run = found.info.run_id
        if earlier:
            self._client.update_run(self._run, status="RUNNING")
            return
        params = [entities.Param(_name(key), str(value)[:_LONGEST]) for key, value in about.config.items()]
        for begin in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run, params=params[begin : begin + _PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now, entity = time.time_ns() // 1_000_000, self._entities.Metric
        self._client.log_batch(self._run, metrics=[entity(_name(name), v, now, step) for name, v in values.items()])

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        document = {"columns": list(columns), "data": [list(row) for row in rows]}
        text = json.dumps(document, ensure_ascii=False, default=str)
        self._client.log_text(self._run, text, f"{name}.json")
        tag = json.dumps([{"path": f"{name}.json", "type": "table"}])
        self._client.set_tag(self._run, "mlflow.loggedArtifacts", tag)

    def system(self) -> None:
        values = load()
        now, entity = time.time_ns() // 1_000_000, self._entities.Metric
        metrics = [entity(f"system/{name}", value, now, 0) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def artifact(self, path: Path, name: str) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._run, str(path), name)
        else:
            self._client.log_artifact(self._run, str(path))

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run, status=_ENDS.get(status, "FINISHED"))


def _name(name: str) -> str:
    """MLflow allows letters, digits and _-. /: in names.

    >>> _name("rewards/my[x]_mean")
    'rewards/my_x__mean'
    """
    return _NOT_ALLOWED.sub("_", name)
