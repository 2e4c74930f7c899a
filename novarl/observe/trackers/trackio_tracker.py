"""trackio: a local dashboard in SQLite (`trackio show`), or a Space if TRACKIO_SPACE_ID is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from novarl.observe.trackers.tracker import About


class TrackioTracker:
    """One run in trackio, which records the machine's load itself."""

    def start(self, about: About) -> None:
        import trackio
        from trackio import run, utils

        for module in (trackio, run, utils):  # it prints greetings, which would tear the live line
            module.print = lambda *words, **options: None
        self._trackio = trackio
        config = {key: value for key, value in about.config.items() if not key.startswith("_")}
        resume = "allow" if about.resumed else "never"
        self._run = trackio.init(project=about.project, name=about.name, config=config, resume=resume, embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: self._trackio.Table(columns=list(columns), data=[list(row) for row in rows])})

    def system(self) -> None:
        """trackio does so itself."""

    def artifact(self, path: Path, name: str) -> None:
        artifact = self._trackio.Artifact(name, type="model" if path.is_dir() else "file")
        (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
        self._run.log_artifact(artifact)

    def finish(self, status: str) -> None:
        self._run.finish()
