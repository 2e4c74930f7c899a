"""PyTorch's libraries are there before it is imported, and nothing that a configuration needs waits for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from novarl.config.preload import BEFORE, _map

LOADS = """
import sys, threading
from pathlib import Path
from novarl.config.preload import preload
preload()
for thread in threading.enumerate():
    thread is threading.current_thread() or thread.join()
maps = Path("/proc/self/maps").read_text()
assert "libtorch_cpu.so" in maps and "torch" not in sys.modules
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


def run(script: str) -> str:
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_libraries_are_there_before_torch_is() -> None:
    assert run(LOADS) == "3.0 torch._C\n"


def test_every_compiled_module_that_a_configuration_needs_comes_first() -> None:
    needed = set(run(READS).split())
    assert len(needed) > 5 and needed <= {*BEFORE, "pydantic_core._pydantic_core"}


def test_a_library_that_is_not_there_is_left_to_torch(tmp_path: Path) -> None:
    _map(tmp_path)
    (tmp_path / "libtorch_global_deps.so").write_text("no library")
    _map(tmp_path)
