"""Keys do what they say: those of learning change what is learnt, those of the machine and of reports do not."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from novarl.rewards.per_rollout import by_text
from novarl.rewards.registry import REWARDS
from tests.compose.harness import RL, SFT, finished, largest_difference, metrics, questions, weights, write_rows

Learnt = Callable[..., tuple[Path, dict[str, Tensor]]]

LETTERS = f"rollout.stop=[{','.join(string.ascii_letters)}]"
BASE = (
    *("rl", *RL, "reward=digits", "responses_per_prompt=4", "rollout.max_tokens=6", LETTERS, "save_every=null"),
    *("optim.eps=1e-3", "optim.max_grad_norm=0"),
)
"""The stops make answers of different lengths. The large eps keeps AdamW from blowing rounding up: a gradient of 1e-9
must not count as much as one of 1. Without clipping, the scale of a gradient shows."""
MOVING = "updates_per_rollout=2 epochs_per_rollout=2 optim.lr=1e-2 optim.eps=1e-6 seed=1"
"""The second update finds the policy moved, which is where ratios, clips and a KL to the start bite."""
STALE = "dtype=bfloat16 optim.lr=1e-2"
"""Rounding makes sampler and learner differ a little, which is where weights pi_old / mu bite."""

CHANGES = [
    "seed=1",
    "steps=2",
    "prompts_per_rollout=3",
    "responses_per_prompt=3",
    "updates_per_rollout=2",
    "apply_chat_template=false",
    "max_length=8 on_long=truncate",
    "rollout.temperature=0.7",
    "rollout.top_k=2",
    "rollout.top_p=0.5",
    "rollout.min_p=0.5",
    "rollout.max_tokens=5",
    "rollout.stop=[a,e]",
    "algo=reinforce",
    "algo=grpo",
    "adv.estimator=leave_one_out",
    "adv.estimator=none",
    "adv.estimator=mean",
    "adv.estimator=scst",
    "adv.norm_std=true",
    "adv.whiten=true",
    "loss.agg=token",
    "loss.agg=sequence",
    "loss.mask_truncated=true",
    "entropy.coef=0.1",
    "entropy.target=1",
    "correction.tis_max=0.5",
    "optim.lr=2e-3",
    "optim.eps=1e-2",
    "optim.max_grad_norm=0.01",
    "optim.warmup_steps=2",
    "optim.weight_decay=0.5",
    "dtype=bfloat16",
    "reward=length adv.estimator=none",
    "reward.length.source=length reward.length.weight=0.5",
]
OVER_TIME = [
    ("adv.estimator=ema steps=3", "adv.ema_beta=0.5"),
    ("reward=length adv.estimator=none", "reward.length.shortest=0"),
    ("reward=length adv.estimator=none reward.length.shortest=0", "reward.length.longest=0"),
    ("reward=lexical", "reward.lexical.target_words=3 reward.lexical.brevity_penalty_scale=1"),
    ("optim.schedule=linear steps=2", "optim.min_lr_ratio=0.5"),
    ("steps=2", "optim.schedule=cosine"),
    ("steps=2", "optim.warmup_ratio=1"),
    ("steps=2", "optim.betas=[0.5,0.95]"),
    ("steps=2", "optim.betas=[0.9,0.5]"),
    (MOVING, "epochs_per_rollout=1"),
    (MOVING, "clip.low=0.001"),
    (MOVING, "clip.high=0.001"),
    (f"{MOVING} updates_per_rollout=8 clip.high=0.0001 clip.dual=9", "clip.dual=1.0002"),
    (f"{MOVING} loss.surrogate=sapo", "loss.tau_pos=3"),
    (f"{MOVING} loss.surrogate=sapo", "loss.tau_neg=3"),
    (MOVING, "kl.type=loss kl.coef=1"),
    (f"{MOVING} kl.type=loss kl.coef=1", "kl.coef=2"),
    (f"{MOVING} kl.type=loss kl.coef=1", "kl.estimator=k3"),
    ("steps=3 reward=length adv.estimator=none", "rollout.staleness=1"),
    ("steps=2 kl.type=reward kl.coef=1", "kl.type=advantage"),
    ("steps=2 entropy.coef=0.5", "entropy.target=1"),
    ("steps=2 entropy.coef=0.5 entropy.target=1", "entropy.target=20"),
    ("steps=2 entropy.coef=0.5 entropy.target=1", "entropy.rate=0.5"),
    (f"{STALE} adv.estimator=clipped_is adv.rho_max=9", "adv.is_level=trajectory"),
    (f"{STALE} correction.type=sequence", "correction.geometric=true"),
    (f"{STALE} correction.type=sequence_mask", "correction.geometric=true"),
    ("responses_per_prompt=2 prompts_per_rollout=6 reward=parity loss.surrogate=reinforce", "loss.surrogate=gpg"),
    ("steps=2 kl.type=reward kl.coef=1", "kl.estimator=k3"),
    ("steps=2 kl.type=reward kl.coef=1 kl.estimator=k3", "kl.clamp=1e-9"),
    (f"{MOVING} kl.type=loss kl.coef=1 kl.estimator=k3", "kl.clamp=1e-9"),
]
"""What shows only after the first update: what both runs have, and the key that one of them changes."""
NEUTRAL = [
    "keep=1",
    "save_every=1",
    "eval_every=1",
    "keep_best=false",
    "eval.k=2 eval.temperature=0.5 eval.top_k=3 eval.top_p=0.5 eval.min_p=0.1",
    "log.tensorboard=true",
    "log.console=true",
    "log.project=other log.run_name=first log.artifacts=true",
    "log.rollouts_every=null",
    "log.samples_every=null",
    "rollout.reward_timeout=5",
    "rollout.reward_workers=3",
    "rollout.reward_memory=4000",
    "max_bad_rows=0.5",
    "threads=1",
    "device=cpu",
]
ROUNDING = [
    "micro.max_tokens=40",
    "micro.logprob_chunk=3",
    "micro.gradient_checkpointing=true",
    "rollout.max_batch=3",
    "attn=eager",
    "compile=true",
]


@pytest.fixture(scope="module", autouse=True)
def digits() -> Iterator[None]:
    """Rewards by which even an untrained model gets all sorts of scores, and groups of two often equal ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWARDS, "digits", lambda: by_text(lambda text: float(sum(map(ord, text)) % 7)))
        patch.setitem(REWARDS, "parity", lambda: by_text(lambda text: float(sum(map(ord, text)) % 2)))
        yield


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    """The run directory and the weights that the base settings, changed by the words given, lead to. Kept."""
    folder = tmp_path_factory.mktemp("knobs")
    data = write_rows(folder / "rows.jsonl", questions())
    known: dict[tuple[str, ...], tuple[Path, dict[str, Tensor]]] = {}

    def learn(words: str = "", base: tuple[str, ...] = BASE) -> tuple[Path, dict[str, Tensor]]:
        command = (*base, *words.split())
        if command not in known:
            run = folder / str(len(known))
            finished(*command, f"data={data}", f"run_dir={run}")
            known[command] = run, weights(run)
        return known[command]

    return learn


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_base_run_learns_something_and_is_repeated_to_the_bit(learnt: Learnt, tmp_path: Path) -> None:
    run, base = learnt()
    (record,) = metrics(run)
    assert record["grad_norm"] > 1e-3 and record["zero_variance_groups"] == 0
    again = tmp_path / "again"
    finished(*BASE, f"data={run.parent / 'rows.jsonl'}", f"run_dir={again}")
    assert same(weights(again), base)


@pytest.mark.parametrize("words", CHANGES)
def test_a_key_of_learning_changes_what_is_learnt(words: str, learnt: Learnt) -> None:
    assert largest_difference(learnt()[1], learnt(words)[1]) > 1e-7


@pytest.mark.parametrize(("both", "words"), OVER_TIME)
def test_a_key_of_later_updates_changes_what_is_learnt(both: str, words: str, learnt: Learnt) -> None:
    assert largest_difference(learnt(both)[1], learnt(f"{both} {words}")[1]) > 1e-7


@pytest.mark.parametrize("words", NEUTRAL)
def test_a_key_of_reports_changes_not_one_bit(words: str, learnt: Learnt) -> None:
    assert same(learnt()[1], learnt(words)[1])


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("words", ROUNDING)
def test_a_key_of_the_machine_changes_only_rounding(words: str, learnt: Learnt) -> None:
    """Weights move by up to lr = 1e-3 in this step."""
    assert largest_difference(learnt()[1], learnt(words)[1]) < 2e-6


@pytest.mark.usefixtures("traced_only")
def test_only_a_run_that_is_asked_to_compiles(learnt: Learnt, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    data = learnt()[0].parent / "rows.jsonl"
    made = []
    for words in ("compile=false", "compile=true"):
        before = counters["stats"]["unique_graphs"]
        finished(*BASE, f"data={data}", words, f"run_dir={tmp_path / words}")
        made.append(counters["stats"]["unique_graphs"] - before)
    assert made[0] == 0 < made[1]


def test_dynamic_sampling_asks_for_other_prompts(learnt: Learnt) -> None:
    """Under this reward, answers so short are all equal."""
    ((plain,), (few,), (many,)) = (
        metrics(learnt(f"reward=length {words}")[0])
        for words in (
            "dynamic_sampling.enabled=false",
            "dynamic_sampling.enabled=true dynamic_sampling.max_refills=1",
            "dynamic_sampling.enabled=true dynamic_sampling.max_refills=2",
        )
    )
    assert plain["zero_variance_groups"] == 2
    assert [record["episodes"] for record in (plain, few, many)] == [8, 16, 24]


def test_the_prompt_and_the_answer_come_from_the_columns_named(tmp_path: Path) -> None:
    rows = [
        {"q": f"is it {i}?", "m": [{"role": "user", "content": f"or {i}?"}], "a": str(i), "b": "7"} for i in range(20)
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "mine.py").write_text("def reward_fn(messages, answer): return float(answer == '7')")
    means, shown = {}, {}
    for words in ("prompt_key=q answer_key=a", "prompt_key=q answer_key=b", "messages_key=m answer_key=b"):
        run = tmp_path / words.replace(" ", "-")
        reward = f"reward={tmp_path / 'mine.py'}:reward_fn"
        finished("rl", *RL, f"data={data}", reward, *words.split(), f"run_dir={run}")
        means[words] = metrics(run)[0]["reward_mean"]
        shown[words] = (run / "samples.md").read_text()
    assert list(means.values())[1:] == [1.0, 1.0] and means["prompt_key=q answer_key=a"] < 1.0
    assert "is it" in shown["prompt_key=q answer_key=b"] and "or " in shown["messages_key=m answer_key=b"]


@pytest.mark.parametrize(
    "words",
    [
        *("batch_size=3", "steps=2", "seed=1", "optim.lr=1e-4", "max_length=20", "completion_key=answer"),
        *("apply_chat_template=false", "epochs=0.2 steps=null", "eval.n=1"),
    ],
)
def test_a_key_of_fine_tuning_changes_what_is_learnt(words: str, learnt: Learnt) -> None:
    """`eval.n` too: the rows that are held out are not learnt from."""
    base = ("sft", *SFT, "optim.eps=1e-3")
    assert largest_difference(learnt(base=base)[1], learnt(words, base)[1]) > 1e-7


def test_what_a_model_is_asked_changes_what_it_says(tmp_path: Path) -> None:
    base = ("sample", "model=tiny", "prompt=hello", "sampling.max_tokens=8")
    said = finished(*base).out
    assert finished(*base).out == said
    for words in ("seed=1", "prompt=hallo", "sampling.max_tokens=3", "sampling.temperature=0", "n=2"):
        assert finished(*base, words).out != said, words
    assert finished(*base, "sampling.top_k=1").out == finished(*base, "sampling.temperature=0").out
