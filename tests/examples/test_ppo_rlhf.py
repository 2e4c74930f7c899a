"""The RLHF example runs as its first lines say: it learns what is preferred and stays as near as it was told to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from novarl.core.checkpoint import open_checkpoint
from novarl.envs.tensor import PreferenceBandit
from tests.examples.test_examples import ROOT, load_module, one_thread

EXAMPLE = ROOT / "examples" / "ppo_rlhf_single_turn.py"
ITERATIONS, TARGET = 120, 0.3
LOGGED = {"reward", "objective", "kl", "kl_to_ref", "kl_coef", "entropy", "value_loss", "clip_fraction", "episodes/s"}


@dataclass(frozen=True)
class Ran:
    steps: list[dict[str, float]]
    chances: dict[str, list[float]]
    saved: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run as users run it, with no help from PYTHONPATH, in a directory of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    home = tmp_path_factory.mktemp("rlhf")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=home,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    steps = [
        {name: float(value) for name, value in re.findall(r"([\w/]+) +([-+]?[\d.]+)", line)}
        for line in lines[:ITERATIONS]
    ]
    chances = {line[:26].strip(): [float(x) for x in line[26:].split()] for line in lines[ITERATIONS:-2]}
    saved = home / re.fullmatch(r"saved (.+)", lines[-1])[1]  # type: ignore[index]
    return Ran(steps, chances, saved)


def test_the_best_action_wins_for_all_four_prompts(ran: Ran) -> None:
    bandit = PreferenceBandit.read(ROOT / "examples" / "bandit" / "prompts.jsonl")
    best = dict(zip(bandit.texts, bandit.rewards.argmax(dim=1).tolist(), strict=True))
    assert len(best) == 4 and best == {text: row.index(max(row)) for text, row in ran.chances.items()}
    assert all(sum(row) == pytest.approx(1.0, abs=2e-3) and max(row) > 0.5 for row in ran.chances.values())


def test_kl_ends_in_its_window_and_was_driven_there(ran: Ran) -> None:
    away = [step["kl_to_ref"] for step in ran.steps]
    assert TARGET / 1.5 <= away[-1] <= TARGET * 1.5
    assert sum(TARGET / 1.5 <= kl <= TARGET * 1.5 for kl in away[-50:]) >= 40
    assert max(away) > 1.5 * TARGET, "the penalty that it begins with is too small, or nothing had to be adapted"
    coefficients = [step["kl_coef"] for step in ran.steps]
    assert coefficients[0] == 0.05 and max(coefficients) > 0.2
    for kl, now, then in zip(away[:-1], coefficients[:-1], coefficients[1:], strict=True):
        # Rounded to four digits, a KL next to the band's edge may be on either side of it.
        wanted = 1.1 if kl > 1.5 * TARGET + 1e-4 else 1 / 1.1 if kl < TARGET / 1.5 - 1e-4 else 1.0
        near = min(abs(kl - 1.5 * TARGET), abs(kl - TARGET / 1.5)) <= 1e-4
        assert near or then == pytest.approx(max(now * wanted, 1e-4), abs=1.2e-4)


def test_it_logs_what_the_document_names_and_reward_rises(ran: Ran) -> None:
    assert len(ran.steps) == ITERATIONS and all(step.keys() >= LOGGED for step in ran.steps)
    first, last = ran.steps[:5], ran.steps[-5:]
    assert sum(step["reward"] for step in last) / 5 > first[0]["reward"] + 0.3
    assert any(step["clip_fraction"] > 0 for step in ran.steps) and all(step["kl"] > 0 for step in first)
    assert last[-1]["entropy"] < first[0]["entropy"] and all(step["episodes/s"] > 0 for step in ran.steps)


def test_the_checkpoint_is_whole_and_holds_the_policy(ran: Ran) -> None:
    assert ran.saved.parent.parts[-2:] == ("checkpoints", "ppo_rlhf_single_turn")
    found = open_checkpoint(ran.saved)
    assert (ran.saved.parent / "latest").resolve() == ran.saved.resolve()
    kinds = {path.suffix for path in ran.saved.rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json", ""}, "safetensors, JSON and the MANIFEST"
    json.loads((ran.saved / "state.json").read_text())
    module, state = load_module(EXAMPLE), found.load()
    bandit = PreferenceBandit.read(module.PROMPTS)
    network = module.Network(bandit.observation_size, bandit.actions)
    network.load_state_dict(load_file(found.model / "model.safetensors"))
    with torch.no_grad():
        again = network(bandit.features)[0].probs.tolist()
    for row, printed in zip(again, ran.chances.values(), strict=True):
        assert row == pytest.approx(printed, abs=6e-4)
    assert state["optimizer"].keys() == dict(network.named_parameters()).keys()
    assert all(float(moments["step"]) == ITERATIONS * 4 * 2 for moments in state["optimizer"].values())
    # The last iteration's KL is answered once more before the state is saved.
    assert state["controller"]["coef"] == pytest.approx(ran.steps[-1]["kl_coef"], rel=0.11)


def test_another_target_is_held_and_a_seed_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = load_module(EXAMPLE)

    def last(target: float, seed: int, iterations: int = ITERATIONS) -> tuple[float, list[str]]:
        with one_thread():
            module.train(iterations, target, seed, tmp_path)
        found = re.findall(r"kl_to_ref ([\d.]+)", capsys.readouterr().out)
        return float(found[-1]), found

    assert 0.15 / 1.5 <= last(0.15, 0)[0] <= 0.15 * 1.5
    assert last(TARGET, 1, 4)[1] == last(TARGET, 1, 4)[1] != last(TARGET, 2, 4)[1]
