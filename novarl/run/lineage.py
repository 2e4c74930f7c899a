"""The runs that produced a model, as far as their directories still exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from novarl.core.config_files import read
from novarl.core.errors import NovaError


def runs_behind(model: str) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The run whose checkpoint contains `model`, with its configuration, then the run behind its initial model, and so
    on."""
    seen: set[Path] = set()
    while (run := _run_around(Path(model).expanduser().resolve())) is not None and run not in seen:
        try:
            config, _ = read(run / "config.yaml")
        except NovaError:
            return
        yield run, config
        seen.add(run)
        model = str(config.get("model", ""))


def _run_around(folder: Path) -> Path | None:
    checkpoints = next((parent for parent in folder.parents if parent.name == "checkpoints"), None)
    run = None if checkpoints is None else checkpoints.parent
    return run if run is not None and (run / "config.yaml").is_file() else None


def trained_on(model: str, data: str) -> Path | None:
    """The run behind a model, if any, that was trained on `data`: the same file, folder or dataset name."""
    for run, config in runs_behind(model):
        if isinstance(used := config.get("data"), str) and _same(used, data):
            return run
    return None


def _same(one: str, other: str) -> bool:
    return one == other or Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
