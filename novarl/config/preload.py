"""PyTorch's libraries, mapped by a second thread while the configuration is read.

`import torch` spends much of its time in the dynamic linker, which needs no Python. What is loaded here, in which order
and how is what `import torch` itself does first; where that fails, it is left to that, and to its messages.
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
"""Compiled modules that reading a configuration needs: while a library is being mapped no other can be."""


ACCELERATED = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")
"""Builds that have one of these have an order of their own for the vendor's libraries, which is left to them."""


def preload() -> None:
    """Begin, on Linux, if torch is not there yet and is a build for the CPU; with one core there is nothing to gain."""
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
        except ImportError:  # built into the interpreter, or called otherwise there
            continue
    _settle_pydantic()
    # No daemon: a process that ended, as after a misspelt key, while a library is being set up would crash on its way.
    threading.Thread(target=_map, args=(folder,)).start()


def _settle_pydantic() -> None:
    """Let pydantic's core make what it keeps for each thread: that, too, waits for a library that is being mapped."""
    from pydantic_core import SchemaValidator, core_schema

    field = core_schema.model_field(core_schema.str_schema(pattern="^(a|b)$"))
    SchemaValidator(core_schema.model_fields_schema({"a": field})).validate_python({"a": "a"})


def _map(folder: Path) -> None:
    dlopen = ctypes.CDLL(None).dlopen  # called so, and not as ctypes.CDLL(path), it lets Python go on meanwhile
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for name, how in (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_NOW)):
        if not dlopen(str(folder / name).encode(), how):
            return
