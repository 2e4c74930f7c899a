"""Results that say what they are: every file in docs/results is written here, with command, machine and JSON."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from novarl.core.rundir import environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats with three decimals."""
    shown = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def has_bf16() -> bool:
    """Whether this CPU multiplies bf16 numbers; others only convert them."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())  # type: ignore[no-untyped-call]


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    about = environment()
    packages = about["packages"]
    vectors = torch.backends.cpu.get_cpu_capability()  # type: ignore[no-untyped-call]
    return {
        "processor": f"{about['processor']} ({vectors}{', bf16' if has_bf16() else ''})",
        "cores": about["cores"],
        "threads": os.environ.get("OMP_NUM_THREADS", "2"),
        "python": about["python"],
        "torch": packages["torch"],
        "novarl": about["novarl"],
        "commit": about["code"].get("commit"),
    }


def write(name: str, title: str, body: str, data: Mapping[str, Any]) -> Path:
    """Write docs/results/<name>.md and .json, and print the former."""
    about = machine()
    words = [
        Path(word).name if word.startswith("/") else word for word in sys.argv[1:]
    ]  # where it ran is nobody's business
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])
    text = (
        f"# {title}\n\n{body.strip()}\n\n"
        f"Written by `{command}` on {date.today()}: {about['processor']}, {about['cores']} cores, "
        f"{about['threads']} threads, "
        f"Python {about['python']}, torch {about['torch']}.\n"
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps({"command": command, "machine": about, **data}, indent=1) + "\n")
    print(text)
    return RESULTS / f"{name}.md"
