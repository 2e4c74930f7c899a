"""Weights & Biases. Without an API key, or if the server cannot be reached, the run is recorded offline."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from novarl.observe.trackers.tracker import About

INIT_TIMEOUT = 20.0
"""Seconds to wait for the server."""
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""W&B's own servers, under its old and its new name."""


def mode(environment: Mapping[str, str]) -> str:
    """`online` if there is an API key (WANDB_API_KEY or the netrc file), otherwise `offline`; WANDB_MODE overrides."""
    if given := environment.get("WANDB_MODE"):
        return given
    if environment.get("WANDB_API_KEY"):
        return "online"
    own = environment.get("WANDB_BASE_URL")
    hosts = [own.split("//")[-1].partition("/")[0].partition(":")[0]] if own else HOSTS
    with suppress(OSError, netrc.NetrcParseError):
        known = netrc.netrc(environment.get("NETRC"))
        if any(known.authenticators(host) for host in hosts):
            return "online"
    return "offline"


class WandbTracker:
    """One run in W&B, which records the machine's load itself."""

    def start(self, about: About) -> None:
        import wandb

        self._wandb = wandb
        # What W&B collects by itself may hold secrets: the command line, the git remote, the source code.
        hidden = {"x_disable_meta": True, "disable_git": True, "disable_code": True, "save_code": False}
        settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT, **hidden)
        wandb.setup(settings)  # or it prints what it does with artifacts
        options: dict[str, Any] = {
            "project": about.project,
            "name": about.name,
            "id": about.id,
            "resume": "allow",
            "config": dict(about.config),
            "settings": settings,
            "dir": os.environ.get("WANDB_DIR") or os.getcwd(),
        }
        chosen: Any = mode(os.environ)
        try:
            self._run = wandb.init(mode=chosen, **options)
        except wandb.errors.CommError:
            if chosen != "online":
                raise
            # Under another id: W&B's process still holds the first one.
            self._run = wandb.init(mode="offline", **options | {"id": f"{about.id}-offline"})
        self._run.define_metric("*", step_metric="step")  # W&B's own step must not repeat, and ours may

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        shown = [[value if isinstance(value, int | float) else str(value or "") for value in row] for row in rows]
        self._run.log({name: self._wandb.Table(columns=list(columns), data=shown, allow_mixed_types=True)})

    def system(self) -> None:
        """W&B does so itself."""

    def artifact(self, path: Path, name: str) -> None:
        found = self._wandb.Artifact(f"{self._run.id}-{name}", type="model" if path.is_dir() else "file")
        (found.add_dir if path.is_dir() else found.add_file)(str(path))
        self._run.log_artifact(found)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))
