"""Processor facts needed before torch is imported. `python -P novarl/core/processor.py` prints the MKL mode.

MKL chooses a kernel by the shape of a product, so the last bits of a row depend on the number of rows. `MKL_CBWR` makes
it use one kernel for all shapes, but which value works depends on the processor. Measured for rows in multiples of 4
and one to three threads: on Intel those ending in STRICT (not plain AVX2), on AMD AVX2.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

_ENOUGH = 8192
"""Characters of /proc/cpuinfo that describe the first core; reading all of it is slow on large machines."""


def about() -> dict[str, str]:
    """The /proc/cpuinfo fields of the first core; on other systems only the processor name."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            first = file.read(_ENOUGH).partition("\n\n")[0]
    except OSError:
        return {"model name": platform.processor()}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def name() -> str:
    """The name of the processor with its family and model, because generations of different speed share a name."""
    known = about()
    called = known.get("model name") or platform.processor()
    generation = (("family", "cpu family"), ("model", "model"))
    return ", ".join([called, *(f"{word} {known[key]}" for word, key in generation if key in known)])


def halves_avx512() -> bool:
    """Whether AVX-512 takes two cycles (AMD family 25, Zen 3 and 4), so that it is hardly faster than AVX2."""
    known = about()
    return known.get("vendor_id") == "AuthenticAMD" and known.get("cpu family") == "25"


def exact_products() -> str:
    """The MKL_CBWR value with which the bits of a row do not depend on other rows; to be set before torch is loaded."""
    known = about()
    if "Intel" not in known.get("vendor_id", known.get("model name", "")):
        return "AVX2"
    return "AVX512,STRICT" if "avx512f" in known.get("flags", "").split() else "AVX2,STRICT"


def settle_products() -> None:
    """Set MKL's kernel mode before torch is loaded, so that a request's results do not depend on its batch."""
    os.environ.setdefault("MKL_CBWR", exact_products())
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # threads of numpy's OpenBLAS would start at import and stay idle


def settle_threads(threads: int | None) -> None:
    """Set the number of threads, before any computation."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if threads is not None:
            os.environ[name] = str(threads)
        else:
            os.environ.setdefault(name, os.environ.get("OMP_NUM_THREADS", "2"))


if __name__ == "__main__":
    print(exact_products())
