"""Loads PyTorch's shared libraries in a second thread while the configuration is read.

`import torch` spends much of its time in the dynamic linker, which does not need Python. The libraries are loaded in
the same order and with the same flags as by `import torch`; errors are left to `import torch` to report.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path

BEFORE = (
    *("_bisect", "_blake2", "_bz2", "_contextvars", "_csv", "_datetime", "_decimal", "_hashlib", "_heapq", "_json"),
    *("_lzma", "_opcode", "_random", "_sha512", "_socket", "_struct", "_typing", "_uuid", "_zoneinfo", "array"),
    *("binascii", "math", "select", "yaml._yaml", "zlib"),
)
"""Compiled modules needed to read a configuration; only one library can be loaded at a time."""


ACCELERATED = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")
"""Builds with one of these libraries load the vendor's libraries in their own order, which is left to them."""


def preload() -> None:
    """Start loading, on Linux with a CPU build of torch that is not imported yet and more than one core."""
    if sys.platform != "linux" or "torch" in sys.modules or len(os.sched_getaffinity(0)) == 1:
        return
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return
    folder = Path(found.origin).parent / "lib"
    if any((folder / name).exists() for name in ACCELERATED):
        return
    for name in BEFORE:
        try:
            importlib.import_module(name)
        except ImportError:  # built into the interpreter, or named differently
            continue
    _settle_pydantic()
    # Not a daemon: a process that exits while a library is being initialized would crash.
    threading.Thread(target=_map, args=(folder,)).start()


def _settle_pydantic() -> None:
    """Let pydantic's core create its per-thread state, which would also wait for a library that is being loaded."""
    from pydantic_core import SchemaValidator, core_schema

    field = core_schema.model_field(core_schema.str_schema(pattern="^(a|b)$"))
    SchemaValidator(core_schema.model_fields_schema({"a": field})).validate_python({"a": "a"})


def _map(folder: Path) -> None:
    dlopen = ctypes.CDLL(None).dlopen  # unlike ctypes.CDLL(path), this call releases the GIL
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for name, how in (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_NOW)):
        if not dlopen(str(folder / name).encode(), how):
            return
