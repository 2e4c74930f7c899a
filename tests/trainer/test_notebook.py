"""The API in a real notebook kernel, where an event loop runs already: it trains, shows progress, and draws curves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from novarl.observe.run import load_run

ROOT = Path(__file__).parents[2]
CELL = """
import novarl
rows = [{"prompt": f"say {word}", "answer": word} for word in ("ab", "ba", "aa", "bb")]
def starts_right(completion, answer):
    return float(completion[:1] == answer[:1])
trainer = novarl.RL(model="tiny", prompts=rows, reward=starts_right, algo="grpo", steps=3, run_dir="run",
                    rollout={"max_tokens": 4}, prompts_per_rollout=2, responses_per_prompt=4)
seen = [record["step"] for record in trainer]
print("steps", seen, trainer.summary["status"])
print("answer", trainer.generate("say ab", max_tokens=2))
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path), env=dict(os.environ))
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_run_in_a_notebook(kernel: Any, tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = []
    reply = kernel.execute_interactive(CELL, output_hook=messages.append, timeout=300)
    assert reply["content"]["status"] == "ok", "\n".join(reply["content"].get("traceback", ()))
    text = "".join(one["content"]["text"] for one in messages if one["msg_type"] == "stream")
    assert "steps [1.0, 2.0, 3.0] done" in text and "answer ['" in text
    shown = [one["content"]["data"] for one in messages if one["msg_type"] in ("display_data", "update_display_data")]
    progress = [data["text/plain"] for data in shown if "█" in data.get("text/plain", "")]
    assert any("3/3" in line and "Reward=" in line for line in progress)
    assert sum("image/png" in data for data in shown) == 1, "the curves, once"
    metrics = load_run(tmp_path / "run").metrics
    assert metrics.to_pandas()["reward_mean"].tolist() == metrics.series("reward_mean") and len(metrics) == 3
