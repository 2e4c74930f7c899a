"""The reader's own algorithm: examples/my_algorithm.py plugs in, trains, and is told what is wrong with it."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path

import pytest
import torch

from novarl.algos.advantages import group as centred
from novarl.algos.surrogates import reinforce
from novarl.compose.custom import own_estimator, own_surrogate
from tests.compose.harness import ROOT, finished, largest_difference, metrics, novarl, weights

EXAMPLE = ROOT / "examples/my_algorithm.py"
SPO, RANK = f"loss.surrogate={EXAMPLE}:spo", f"adv.estimator={EXAMPLE}:rank"
QUIET = ("log.console=false", "log.tensorboard=false")
RUN = (
    "rl",
    "task=sort",
    "warmup=2",
    "prompts_per_rollout=2",
    "responses_per_prompt=4",
    "eval.n=2",
    *QUIET,
)


REWARD = "def reward_fn(messages, answer):\n    return sum(map(ord, messages[-1]['content'])) % 97 / 97\n"
"""Differs from answer to answer, also of an untrained model."""


def train(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    reward = folder.parent / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    finished(
        *RUN,
        f"reward={reward}:reward_fn",
        "steps=2",
        "updates_per_rollout=4",
        "optim.lr=0.01",
        f"run_dir={folder}",
        *words,
    )
    return weights(folder)


def test_it_is_short_and_outside_the_package() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 30
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(ast.parse(text)))


def test_it_trains_and_each_part_changes_the_weights(tmp_path: Path) -> None:
    choices: list[tuple[str, ...]] = [(), (SPO,), (RANK,), (SPO, RANK), (SPO, "clip.high=0.02")]
    trained = [train(tmp_path / str(number), *words) for number, words in enumerate(choices)]
    for a, b in itertools.combinations(range(len(choices)), 2):
        assert largest_difference(trained[a], trained[b]) > 1e-5, (choices[a], choices[b])
    assert largest_difference(trained[3], train(tmp_path / "again", SPO, RANK)) == 0.0
    assert all(row["grad_norm"] > 0 for row in metrics(tmp_path / "3") if "reward_mean" in row)


def test_spo_is_reinforce_on_policy_and_pulls_back_off_it() -> None:
    spo = own_surrogate(f"{EXAMPLE}:spo", {"clip_low": 0.2, "clip_high": 0.2}, clip_given=False)
    advantage, mask = torch.tensor([2.0, -1.0, 0.5]).double(), torch.tensor([True, True, False])

    def slope(surrogate: object, ahead: float) -> list[float]:
        logp = torch.tensor([-1.0, -0.3, -2.0]).double().requires_grad_()
        loss, _ = surrogate(logp, logp.detach() - ahead, advantage, mask)  # type: ignore[operator]
        loss.sum().backward()
        return logp.grad.tolist()  # type: ignore[union-attr]

    assert slope(spo, 0.0) == pytest.approx(slope(reinforce, 0.0), abs=1e-12)
    at_bound = slope(spo, math.log(1.2))
    assert at_bound[0] == pytest.approx(0.0, abs=1e-12), "at 1 + epsilon the gain of a good token is at its top"
    assert at_bound[1] > 0 and at_bound[2] == 0.0
    assert slope(spo, 0.5)[0] > 0, "beyond it the ratio is pulled back"


def test_rank_is_the_share_beaten_less_the_share_that_beats() -> None:
    rank = own_estimator(f"{EXAMPLE}:rank")
    rewards, groups = torch.tensor([0.0, 9.0, 1.0, 1.0, 5.0, 5.0]), torch.tensor([7, 7, 7, 7, 3, 3])
    assert rank(rewards, groups).tolist() == pytest.approx([-1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    two = torch.tensor([0.0, 1.0])
    assert rank(two, torch.zeros(2, dtype=torch.int64)).tolist() == (2 * centred(two, torch.zeros(2).long())).tolist()


HEAD = "def f(logp, old_logp, advantage, mask"
BROKEN = {
    "raises": (f"{HEAD}):\n    return logp[None] @ mask[:7].double()", "mine.py:2: raised RuntimeError"),
    "summed": (f"{HEAD}):\n    return (-logp * advantage).sum()", "must have shape [3], got []"),
    "constant": (f"{HEAD}):\n    return advantage", "it has no gradient"),
    "nothing": (f"{HEAD}):\n    pass", "the loss must be a tensor, got None"),
    "not finite": (f"{HEAD}):\n    return logp / 0", "not finite"),
    "statistics": (f"{HEAD}):\n    return -logp, {{'mine': mask}}", "clip_fraction"),
    "arguments": (
        "def f(rewards, group):\n    return rewards",
        "write it as f(logp, old_logp, advantage, mask) -> loss",
    ),
    "keyword": (f"{HEAD}, *, tau):\n    return -logp", "missing a required argument: 'tau'"),
    "name": ("def ff(logp, old_logp, advantage, mask):\n    return -logp", "has no function 'f' (did you mean 'ff'?)"),
    "syntax": ("def f(:", "mine.py:1: does not compile"),
    "import": ("import torch\nimport nowhere_to_be_found", "mine.py:2: raised ModuleNotFoundError"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_one_sentence_before_anything_is_written(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, said = BROKEN[case]
    Path("mine.py").write_text(text, encoding="utf-8")
    ended = novarl(*RUN, "steps=1", "run_dir=run", "loss.surrogate=mine.py:f")
    assert ended.code == 2 and said in ended.err and len(ended.err.strip().splitlines()) == 1, ended.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss.surrogate=mine.py"], "write it as file.py:function_name"),
        (["loss.surrogate=other.py:f"], "other.py: no such file"),
        (["loss.surrogate=mine.py:f", "clip.low=0.1"], "has no bounds to be given"),
        (["adv.estimator=mine.py:f"], "write it as f(rewards, group) -> advantage"),
        (["adv.estimator=mine.py:late", "adv.norm_std=true"], "norm_std"),
        (["adv.estimator=mine.py:late"], "mine.py:6: raised ZeroDivisionError"),
        (["loss.surrogate=minepy:f"], "must be 'reinforce', 'ppo_clip'"),
    ],
)
def test_so_is_what_is_wrong_with_the_words(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = "def f(logp, old_logp, advantage, mask):\n    return -logp * advantage\n\n\n"
    late = "def late(rewards, group):\n    return rewards if len(rewards) < 8 else rewards / (0 // 0)\n"
    Path("mine.py").write_text(own + late, encoding="utf-8")
    ended = novarl(*RUN, "steps=1", "run_dir=run", *words)
    assert ended.code == 2 and said in ended.err and len(ended.err.strip().splitlines()) == 1, ended.err
