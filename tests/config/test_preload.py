"""PyTorch's libraries are there before it is imported, and nothing that a configuration needs waits for them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from novarl.config.preload import ACCELERATED, BEFORE

LOADS = """
import sys, threading
from pathlib import Path
from novarl.config.preload import preload
preload()
for thread in threading.enumerate():
    thread is threading.current_thread() or thread.join()
maps = Path("/proc/self/maps").read_text()
assert "torch" not in sys.modules
print("libtorch_cpu.so" in maps, end=" ")
import torch
print((torch.ones(3) @ torch.ones(3)).item(), torch._C.__name__)
preload()
assert threading.active_count() == 1
"""

READS = """
import sys
from novarl.config.load import load
from novarl.config.tree import RLConfig
load(RLConfig, None, ["task=sort"])
print(*(name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).endswith(".so")))
"""


def run(script: str, *arguments: str) -> str:
    found = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_libraries_are_there_before_torch_is() -> None:
    """Unless they are of a build for GPUs, which are left alone."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    for_gpus = any((Path(spec.origin).parent / "lib" / name).exists() for name in ACCELERATED)
    assert run(LOADS) == f"{not for_gpus} 3.0 torch._C\n"


def test_every_compiled_module_that_a_configuration_needs_comes_first() -> None:
    needed = set(run(READS).split())
    assert len(needed) > 5 and needed <= {*BEFORE, "pydantic_core._pydantic_core"}


ENDS_EARLY = """
import sys
from pathlib import Path
from novarl.config.preload import _map
_map(Path(sys.argv[1]))
print("libtorch" in Path("/proc/self/maps").read_text(), end=" ")
import torch
print(torch.ones(3).sum().item())
"""


def test_a_library_that_does_not_load_is_left_to_torch_with_those_after_it(tmp_path: Path) -> None:
    real = find_spec("torch")
    assert real is not None and real.origin is not None
    for library in (Path(real.origin).parent / "lib").glob("*.so*"):
        (tmp_path / library.name).symlink_to(library)
    assert run(ENDS_EARLY, str(tmp_path)) == "True 3.0\n", "the folder would do"
    (tmp_path / "libtorch_global_deps.so").unlink()
    assert run(ENDS_EARLY, str(tmp_path)) == "False 3.0\n"
    (tmp_path / "libtorch_global_deps.so").write_text("no library")
    assert run(ENDS_EARLY, str(tmp_path)) == "False 3.0\n"


BEGINS = """
import importlib.util, sys, threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from novarl.config import preload
importlib.util.find_spec = lambda name: ModuleSpec(name, None, origin=str(Path(sys.argv[1]) / "__init__.py"))
begun = []
preload._map = begun.append
preload.preload()
for thread in threading.enumerate():
    thread is threading.current_thread() or thread.join()
print(len(begun))
"""


@pytest.mark.parametrize(("name", "begun"), [("libtorch_cpu.so", 1), *((name, 0) for name in ACCELERATED)])
def test_builds_for_an_accelerator_are_left_alone(name: str, begun: int, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / name).touch()
    assert run(BEGINS, str(tmp_path)) == f"{begun}\n"
