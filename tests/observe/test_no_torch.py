"""What only reads or writes a run's records starts at once: no torch, and matplotlib and rich only where they draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import io, sys
from pathlib import Path
import novarl.observe.glossary, novarl.observe.figures, novarl.observe.summary
from novarl.observe.sinks.console import ConsoleSink
from novarl.observe.sinks.jsonl import JsonlSink
from novarl.observe.sinks.tensorboard import TensorBoardSink

assert not {"matplotlib", "rich", "tensorboard"} & set(sys.modules), "loaded before it was needed"
run = Path(sys.argv[1])
sinks = [JsonlSink(run), TensorBoardSink(run / "tb"), ConsoleSink(io.StringIO())]
for sink in sinks:
    sink.event("phase", {"name": "rl", "steps": 1})
    sink.step(1, {"reward_mean": 1.0})
    sink.flush()
    sink.close()
assert not {"matplotlib", "rich"} & set(sys.modules), "a pipe needs neither"
novarl.observe.figures.draw(run)
assert not {"torch", "transformers", "pydantic", "tensorflow"} & set(sys.modules)
"""


def test_no_torch(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
