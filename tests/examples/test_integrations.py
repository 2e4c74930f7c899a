"""The examples for runs of other libraries. The one for TRL runs in `make test-trl`; here TRL is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import novarl
from tests.examples.test_examples import ROOT, run


def test_openrlhf(tmp_path: Path) -> None:
    shown = run("examples/openrlhf_integration.py", str(tmp_path / "run"))
    written = novarl.load_run(tmp_path / "run")
    assert "100 lines of metrics" in shown and len(written.metrics) == 100
    rewards = written.metrics.series("reward_mean")
    assert rewards[0] < 0.5 < 0.9 < rewards[-1] and (written.summary or {})["status"] == "done"


def test_without_trl_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "trl.py").write_text("raise ImportError('there is no TRL')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "examples/trl_integration.py", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and 'pip install "trl==1.16.*"' in done.stderr and not (tmp_path / "run").exists()
