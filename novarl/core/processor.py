"""What must be known of the processor before torch is there. `python novarl/core/processor.py` prints MKL's mode.

Which kernel MKL takes for a product follows its shape, so that a row's last bits follow how many rows there are beside
it. `MKL_CBWR` has it take one for all, but not every value does on every processor. Measured, for rows in multiples of
4 and one to three threads: on Intel's those that end in STRICT, AVX2 alone not; on AMD's, AVX2.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

_ENOUGH = 8192
"""Characters of /proc/cpuinfo that describe the first core; for all of a large machine's the system takes its time."""

_WHICH = {"family": "cpu family", "model": "model"}
"""What tells generations apart, in our words and in those of /proc/cpuinfo."""


def about() -> dict[str, str]:
    """What the system says of the first core, as in /proc/cpuinfo; elsewhere what it calls the processor alone."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            first = file.read(_ENOUGH).partition("\n\n")[0]
    except OSError:
        return {"model name": platform.processor()}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def name() -> str:
    """What the processor calls itself, and which of those it is: generations of unlike speed share a name."""
    known = about()
    called = known.get("model name") or platform.processor()
    return ", ".join([called, *(f"{word} {known[key]}" for word, key in _WHICH.items() if key in known)])


def halves_avx512() -> bool:
    """Whether an AVX-512 instruction takes the processor two turns, as on AMD's of family 25 (Zen 4, and Zen 3, which
    has none), so that it multiplies little faster than with AVX2."""
    known = about()
    return known.get("vendor_id") == "AuthenticAMD" and known.get("cpu family") == "25"


def exact_products() -> str:
    """The MKL_CBWR under which a row of a product has the same bits whatever rows are beside it. It must be in the
    environment before torch loads."""
    known = about()
    if "Intel" not in known.get("vendor_id", known.get("model name", "")):
        return "AVX2"
    return "AVX512,STRICT" if "avx512f" in known.get("flags", "").split() else "AVX2,STRICT"


def settle_products() -> None:
    """What must be in the environment before torch's libraries are there: MKL's choice of kernels. With one for every
    shape, a request's numbers do not depend on what else is in its batch."""
    os.environ.setdefault("MKL_CBWR", exact_products())
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, which would begin with its import and do nothing


def settle_threads(threads: int | None) -> None:
    """The number of threads, before anything computes."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if threads is not None:
            os.environ[name] = str(threads)
        else:
            os.environ.setdefault(name, os.environ.get("OMP_NUM_THREADS", "2"))


if __name__ == "__main__":
    print(exact_products())
