"""configs/ppo.yaml: the documents' PPO, whose three blocks are switched on and off on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compose.harness import QUIET, ROOT, finished, metrics, summary

SMALL = (
    "steps=2",
    "warmup=2",
    "prompts_per_rollout=2",
    "responses_per_prompt=4",
    "eval.n=2",
    "adaptive_kl.target_kl=1e-4",  # far below what the first update moves: the coefficient must answer
    "save_every=null",
    *QUIET,
)
SWITCHES = {
    "as it is": ((), {"kl_coef", "value_loss", "explained_variance"}),
    "no controller": (("adaptive_kl=false",), {"kl_coef"}),
    "bounds": (("adaptive_kl=false", "constraint_optimization=true"), {"kl_multiplier", "entropy_multiplier"}),
    "objectives": (("multi_objective=true",), {"objective/kl_weight", "objective/entropy_weight"}),
    "RL2's objectives": (
        (
            "multi_objective=true",
            "multi_objective.objectives=[reward,kl_penalty]",
            "multi_objective.objective_weights={reward: 1.0, kl_penalty: -0.1}",
        ),
        {"objective/reward_weight", "objective/kl_weight"},
    ),
}


@pytest.mark.parametrize(("words", "names"), SWITCHES.values(), ids=SWITCHES)
def test_its_blocks_are_switched_on_and_off(words: tuple[str, ...], names: set[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished("rl", str(ROOT / "configs" / "ppo.yaml"), *SMALL, *words, f"run_dir={run}")
    assert summary(run)["status"] == "done"
    last = metrics(run)[-1]
    assert names <= set(last)
    coefficients = {row["kl_coef"] for row in metrics(run) if "kl_coef" in row}
    moves = "adaptive_kl=false" not in words
    assert (len(coefficients) > 1) == (moves or "constraint_optimization=true" in words)
