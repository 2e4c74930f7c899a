"""What a user allows of the files of a model: by default nothing of them runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from novarl.core.errors import NovaError

SAFE = "*.safetensors"
PICKLES = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Trust:
    """Directories and hub ids, as the user named them, of models whose own Python code may run (`code`) and whose
    weights may be read from pickle files (`pickles`)."""

    code: tuple[str, ...] = ()
    pickles: tuple[str, ...] = ()

    def runs_code(self, name: str) -> bool:
        return _same(name, self.code)

    def reads_pickles(self, name: str) -> bool:
        return _same(name, self.pickles)

    def of_copy(self, name: str, copy: str) -> Trust:
        """The same for `copy`, a directory that this run has written from the model `name`."""
        return Trust((*self.code, copy), self.pickles) if self.runs_code(name) else self


NOTHING = Trust()


def check_weights(name: str, trust: Trust) -> None:
    """NovaError: the directory `name` holds weights only as pickle files, and these are not trusted."""
    folder = Path(name)
    if not folder.is_dir() or any(folder.glob(SAFE)) or trust.reads_pickles(name):
        return
    found = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if found:
        what = f"the weights are in a pickle file ({found[0]}), a format that can hold code"
        fix = f"save the model as safetensors, or, if you trust whoever made it, set trust_pickle={name}"
        raise NovaError(what, where=name, fix=fix)


def _same(name: str, trusted: tuple[str, ...]) -> bool:
    """By text, as hub ids are named, or as a path, however it is written."""
    return any(name == one or (Path(name).exists() and _resolved(name) == _resolved(one)) for one in trusted)


def _resolved(name: str) -> Path:
    return Path(name).expanduser().resolve()
