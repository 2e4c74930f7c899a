"""Which of MKL's modes a processor needs, by what the system says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from novarl.core import processor

INTEL = (
    "processor : 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx2{}\n\nprocessor : 1\n"
)
AMD = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    "flags\t\t: fpu avx2 avx512f\n\nprocessor : 1\n"
)
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n\n"


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        (INTEL.format(" avx512f avx512bw"), "AVX512,STRICT"),
        (INTEL.format(""), "AVX2,STRICT"),
        (AMD, "AVX2"),
        (ARM, "AVX2"),
    ],
)
def test_the_mode_of_a_processor(said: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", lambda path, **how: _File(said))
    assert processor.exact_products() == mode


@pytest.mark.parametrize(
    ("said", "name"),
    [(AMD, "AMD EPYC, family 25, model 17"), (INTEL.format(""), "Intel(R) Xeon(R)"), (ARM, "what Python says")],
)
def test_generations_of_one_name_are_told_apart(said: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", lambda path, **how: _File(said))
    monkeypatch.setattr(processor.platform, "processor", lambda: "what Python says")
    assert processor.name() == name


@pytest.mark.parametrize(
    ("said", "halves"),
    [
        (AMD, True),
        (AMD.replace(": 25", ": 26"), False),
        (AMD.replace("AuthenticAMD", "GenuineIntel"), False),
        (ARM, False),
    ],
)
def test_whether_avx512_takes_two_turns(said: str, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", lambda path, **how: _File(said))
    assert processor.halves_avx512() == halves


class _File:
    def __init__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read(self, count: int) -> str:
        return self.text[:count]


def test_where_the_system_says_nothing_its_own_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **how: str) -> _File:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(processor.platform, "processor", lambda: "Intel64 Family 6 Model 85 Stepping 7, GenuineIntel")
    assert processor.exact_products() == "AVX2,STRICT"


def test_the_makefile_takes_the_same_mode() -> None:
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MKL_", "MAKE", "MFLAGS"))}
    words = ["make", "-pn", "help", f"PYTHON={sys.executable}"]
    database = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True).stdout
    assert f"MKL_CBWR := {processor.exact_products()}\n" in database


ROWS = """
import torch
torch.set_num_threads({threads})
draw = torch.Generator().manual_seed(0)
for inner, outer in ((64, 64), (128, 320), (96, 256), (256, 1024), (1024, 256), (512, 2048)):
    weight, rows = (torch.randn(count, inner, generator=draw) for count in (outer, 1000))
    alone = torch.cat([rows[first : first + 4].contiguous() @ weight.T for first in range(0, 1000, 4)])
    for count in (*range(8, 132, 4), 404, 1000):
        if not torch.equal(rows[:count] @ weight.T, alone[:count]):
            print("beside others", inner, outer, count)
    if not torch.equal(rows.flip(1) @ weight.flip(1).T, alone):
        print("backwards")
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_under_it_a_row_has_the_same_bits_in_every_product_here(threads: int) -> None:
    """On whatever processor this runs. Added up backwards, all of them have others, which is seen."""
    environment = os.environ | {"MKL_CBWR": processor.exact_products(), "OMP_WAIT_POLICY": "PASSIVE"}
    words = [sys.executable, "-c", ROWS.format(threads=threads)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["backwards"] * 6
