"""Every key of the blocks of configs/ppo.yaml changes the run: its weights, or the coefficients that it reports."""

from __future__ import annotations

import shutil
import string
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from novarl.config.keys import keys
from novarl.config.tree import RLConfig
from novarl.core.config_files import read
from novarl.rewards.per_rollout import by_text
from novarl.rewards.registry import REWARDS
from tests.compose.harness import RL, ROOT, finished, metrics, questions, weights, write_rows

Run = tuple[list[dict[str, float]], dict[str, Tensor]]
LETTERS = f"rollout.stop=[{','.join(string.ascii_letters)}]"
BASE = (
    *(
        "rl",
        *RL,
        "reward=digits",
        "responses_per_prompt=4",
        "rollout.max_tokens=6",
        LETTERS,
        "save_every=null",
        "seed=1",
    ),
    *("algo=ppo", "updates_per_rollout=2", "optim.lr=3e-3", "optim.max_grad_norm=0", "steps=3", "eval.n=1"),
)
"""Three steps: a coefficient moves after the first, the second learns with it, the third shows what came of that."""
ADAPTIVE = "adaptive_kl=true adaptive_kl.target_kl=1e-4"
BOUND = "constraint_optimization=true constraint_optimization.kl_constraint=1e-4 adv.whiten=false"
FLOOR = "constraint_optimization=true constraint_optimization.entropy_constraint=100"
LISTED = "multi_objective.objectives={digits: {direction: max}, length: {direction: min, weight: 0.5}}"
SEVERAL = f"multi_objective=true & {LISTED}"


def under(kind: str, *changes: str) -> list[tuple[str, str]]:
    both = f"{ADAPTIVE} adaptive_kl.controller_type={kind}".replace(" ", " & ")
    return [(both, f"adaptive_kl.{change}") for change in changes]


def given(both: str, section: str, *changes: str) -> list[tuple[str, str]]:
    return [(both if "{" in both else both.replace(" ", " & "), f"{section}.{change}") for change in changes]


FLIPS: list[tuple[str, str]] = [
    *given("", "critic", "shared=true", "clip=1e-3", "lr=1e-2", "updates_per_rollout=4", "warmup_steps=1"),
    *given("critic.shared=true", "critic", "coef=5.0", "clip=1e-3"),
    *given("algo=vineppo vine.samples=2", "vine", "samples=3", "split=e", "max_steps=1"),
    *given("algo=prime", "prime", "beta=0.5", "lr=1e-2", "threshold=3.0"),
    ("", "adaptive_kl.enabled=true"),
    *under("dead_band", "target_kl=1e3", "initial_coef=0.5", "band=1e9", "speed=3.0"),
    *given(f"{ADAPTIVE} adaptive_kl.target_kl=1e3", "adaptive_kl", "min_coef=0.0095"),
    *under("ziegler", "horizon=50", "clip=0.05"),
    *under("exponential", "rate=0.3", "clip=0.2"),
    *under("two_speed", "up=1.2"),
    *given(f"{ADAPTIVE} adaptive_kl.controller_type=two_speed adaptive_kl.up=1.2", "adaptive_kl", "max_coef=0.0105"),
    *given(f"{ADAPTIVE} adaptive_kl.controller_type=two_speed adaptive_kl.target_kl=1e3", "adaptive_kl", "down=0.8"),
    *under("linear", "factor=0.2", "max_step=0.05"),
    *under("pid", "kp=0.4", "ki=0.1", "clip=0.5"),
    *given(
        f"{ADAPTIVE} adaptive_kl.controller_type=pid adaptive_kl.target_kl=10", "adaptive_kl", "kd=0.3", "smoothing=0.9"
    ),
    *under("schedule", "shape=linear", "final_coef=0.005"),
    *given(
        f"{ADAPTIVE} adaptive_kl.controller_type=schedule adaptive_kl.shape=warmup_cosine",
        "adaptive_kl",
        "warmup_frac=0.6",
    ),
    *(
        ("adaptive_kl=true", f"adaptive_kl.controller_type={kind}")
        for kind in ("exponential", "linear", "schedule", "fixed")
    ),
    *given("constraint_optimization.kl_constraint=1e-4", "constraint_optimization", "enabled=true"),
    *given(
        BOUND,
        "constraint_optimization",
        *("kl_constraint=10.0", "entropy_constraint=100.0", "entropy_fraction=1.0", "lagrangian_lr=0.5"),
        *("dual=softplus", "lagrangian_kp=1.0", "lagrangian_init=1.0"),
        *("mode=penalty", "mode=early_stop", "mode=rollback"),
    ),
    *given(FLOOR, "constraint_optimization", "lagrangian_kd=5.0"),
    *given(f"{FLOOR} constraint_optimization.lagrangian_lr=0.01", "constraint_optimization", "entropy_constraint=1.0"),
    *given(
        f"{BOUND} constraint_optimization.mode=penalty", "constraint_optimization", "constraint_violation_penalty=99.0"
    ),
    *given(LISTED, "multi_objective", "enabled=true"),
    *given(
        SEVERAL,
        "multi_objective",
        *("objectives.length.weight=2.0", "objectives.length.direction=max", "method=tchebycheff"),
        *("method=augmented_tchebycheff", "method=smooth_tchebycheff"),
    ),
    *given(f"{SEVERAL} & multi_objective.method=smooth_tchebycheff", "multi_objective", "mu=2.0", "beta=0.1"),
    *given(
        f"{SEVERAL} & multi_objective.method=smooth_tchebycheff", "multi_objective", "objectives.length.ideal=-50.0"
    ),
    *given(f"{SEVERAL} & multi_objective.method=augmented_tchebycheff", "multi_objective", "rho=2.0"),
]
"""What both runs have, and what one of them changes."""


@pytest.fixture(scope="module", autouse=True)
def digits() -> Iterator[None]:
    """A reward by which even an untrained model gets all sorts of scores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWARDS, "digits", lambda: by_text(lambda text: float(sum(map(ord, text)) % 7)))
        yield


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """What a small run reports, without its times, and the weights that it ends with. These are kept, not the run."""
    folder = tmp_path_factory.mktemp("blocks")
    data = write_rows(folder / "rows.jsonl", questions())
    known: dict[str, Run] = {}

    def run(words: str) -> Run:
        if words not in known:
            place = folder / str(len(known))
            finished(*BASE, *(word for word in words.split(" & ") if word), f"data={data}", f"run_dir={place}")
            known[words] = metrics(place), weights(place)
            shutil.rmtree(place)
        return known[words]

    return run


def reported(run: Run) -> list[dict[str, float]]:
    """What moves by itself: coefficients, multipliers, weights."""
    ends = ("_coef", "_multiplier", "_weight")
    return [{name: value for name, value in row.items() if name.endswith(ends)} for row in run[0]]


@pytest.mark.parametrize(("both", "change"), FLIPS)
def test_a_key_of_a_block_changes_the_run(both: str, change: str, ran: Callable[[str], Run]) -> None:
    before, after = ran(both), ran(f"{both} & {change}")
    same = all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    assert not same or reported(before) != reported(after)


def test_every_key_of_the_blocks_is_flipped() -> None:
    blocks = ("critic.", "vine.", "prime.", "adaptive_kl.", "constraint_optimization.", "multi_objective.")
    flipped = {change.partition("=")[0] for _, change in FLIPS}
    missing = {name for name in keys(RLConfig) if name.startswith(blocks)} - flipped
    assert missing == {
        "multi_objective.archive_size",
        "multi_objective.prune",  # both: tests/compose/test_front_of_a_run.py
        "multi_objective.objectives",  # its parts are
        "prime.model",  # tests/compose/test_rm.py
    }


def test_the_blocks_of_the_file_are_the_documents() -> None:
    file, _ = read(Path(ROOT / "configs" / "ppo.yaml"))
    for block in ("adaptive_kl", "constraint_optimization", "multi_objective"):
        assert isinstance(file[block]["enabled"], bool)
    flipped = {change.partition("=")[0] for _, change in FLIPS}
    for block in ("critic", "adaptive_kl", "constraint_optimization", "multi_objective"):
        idle = {f"{block}.{key}" for key in file[block]} - flipped - {"multi_objective.objectives"}
        assert not idle, f"no test flips {idle}"
