"""Which model files the user trusts: by default no code from a model is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from novarl.core.errors import NovaError

SAFE = "*.safetensors"
PICKLES = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Trust:
    """The models, by directory or Hub id, whose Python code may be run and whose pickle files may be read."""

    code: tuple[str, ...] = ()
    pickles: tuple[str, ...] = ()

    def runs_code(self, name: str) -> bool:
        return _same(name, self.code)

    def reads_pickles(self, name: str) -> bool:
        return _same(name, self.pickles)

    def of_copy(self, name: str, copy: str) -> Trust:
        """The same trust for `copy`, a directory that this run saved from the model `name`."""
        return Trust((*self.code, copy), self.pickles) if self.runs_code(name) else self


NOTHING = Trust()


def check_weights(name: str, trust: Trust) -> None:
    """Raise NovaError if the directory `name` has weights only as pickle files and they are not trusted."""
    folder = Path(name)
    if not folder.is_dir() or any(folder.glob(SAFE)) or trust.reads_pickles(name):
        return
    found = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if found:
        what = f"the weights are in a pickle file ({found[0]}), which can contain code"
        fix = f"save the model as safetensors, or if you trust its author, set trust_pickle={name}"
        raise NovaError(what, where=name, fix=fix)


def _same(name: str, trusted: tuple[str, ...]) -> bool:
    """Whether `name` is trusted, compared as text (Hub ids) or as a resolved path."""
    place = Path(name).expanduser().resolve() if Path(name).exists() else None
    return any(name == one or (place and Path(one).expanduser().resolve() == place) for one in trusted)
