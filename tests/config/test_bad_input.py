"""Configurations that cannot be run: each is one NovaError naming the key, and what is right nearby still passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from novarl.config.base import Config
from novarl.config.load import load
from novarl.config.tree import EvalConfig, RLConfig, SampleConfig, SFTConfig
from novarl.core.errors import NovaError

# What is wrong, the key it is about, what is said of it; and what is right nearby. Words are joined by " & ".
ON_A_TASK = [
    # misspelt
    ("optim.lrr=1", "optim.lrr", "unknown key (did you mean optim.lr?)", "optim.lr=1"),
    ("compute_dtype=bfloat16", "compute_dtype", "unknown key (did you mean dtype?)", "torch_dtype=bfloat16"),
    ("kl.type=los", "kl.type", "did you mean loss?", "kl.type=loss"),
    ("reward={a: {source: b, wieght: 1}}", "reward.a.wieght", "unknown key", "reward={a: {source: b, weight: 1}}"),
    ("reward.a.source=b & reward.a.wieght=1", "reward.a.wieght", "unknown key", "reward.a.source=b"),
    ("rollout.temperature.low=1", "rollout.temperature", "is a single value", "rollout.temperature=1"),
    ("completion_key=c", "completion_key", "unknown key", "steps=1"),
    # out of range
    ("steps=0", "steps", "must be at least 1, got 0", "steps=1"),
    ("seed=-1", "seed", "must be at least 0", "seed=0"),
    ("seed=9223372036854775808", "seed", "must be below 9223372036854775808", "seed=9223372036854775807"),
    ("save_every=0", "save_every", "must be at least 1", "save_every=null"),
    ("optim.lr=10", "optim.lr", "must be at most 1.0, got 10", "optim.lr=1"),
    ("optim.lr=0", "optim.lr", "must be above 0.0", "optim.lr=1e-9"),
    ("clip.low=1.5", "clip.low", "must be at most 1.0", "clip.low=0.2"),
    ("rollout.temperature=0", "rollout.temperature", "must be at least 0.0001", "rollout.temperature=0.1"),
    ("eval.temperature=1e-45", "eval.temperature", "must be 0 or at least 0.0001", "eval.temperature=0"),
    ("max_bad_rows=2", "max_bad_rows", "must be at most 1.0", "max_bad_rows=1"),
    ("kl.coef=-1", "kl.coef", "must be at least 0", "kl.coef=0"),
    ("optim.betas=[0.9, 1]", "optim.betas", "must be below 1", "optim.betas=[0.9, 0.99]"),
    ("eval.top_p=0", "eval.top_p", "must be above 0", "eval.top_p=0.1"),
    # of the wrong type
    ("steps=ten", "steps", "must be a whole number, got 'ten'", "steps=10"),
    ("steps=1.5", "steps", "must be a whole number, got 1.5", "steps=1"),
    ("steps=true", "steps", "must be a whole number, got True", "steps=1"),
    ("steps=null", "steps", "must be a whole number, got None", "steps=1"),
    ("steps='10'", "steps", "must be a whole number, got '10'", "steps=10"),
    ("optim.lr=fast", "optim.lr", "must be a number, got 'fast'", "optim.lr=1e-5"),
    ("keep_best=yes", "keep_best", "must be true or false, got 'yes'", "keep_best=true"),
    ("keep_best=1", "keep_best", "must be true or false, got 1", "keep_best=true"),
    ("device=gpu", "device", "must be auto, cpu, cuda", "device=cuda:1"),
    ("dtype=float16", "dtype", "must be 'float32' or 'bfloat16'", "dtype=bf16"),
    ("rollout.stop=END", "rollout.stop", "must be a list, got 'END'", "rollout.stop=[END]"),
    ("rollout.stop=[1]", "rollout.stop", "must be text, got 1", "rollout.stop=['1']"),
    ("optim.betas=[0.9]", "optim.betas", "must be 2 values, got [0.9]", "optim.betas=[0.9, 0.9]"),
    ("optim.betas=[]", "optim.betas", "(for example optim.betas=[0.9, 0.95])", "optim.betas=[0.9, 0.9]"),
    ("optim.betas=[0, 0, 0]", "optim.betas", "must be 2 values", "optim.betas=[0, 0]"),
    ("optim=adam", "optim", "this is a section", "optim={lr: 0.1}"),
    ("task_options.x=[1]", "task_options.x", "a number, text", "task_options.x=1"),
    ("task_options=3", "task_options", "must be a mapping", "task_options={a: 3}"),
    ("reward=3", "reward", "must be a mapping", "reward=length"),
    ("reward={}", "reward", "must not be empty", "reward={a: b}"),
    ("reward={a: 3}", "reward.a", "must be a mapping", "reward={a: b}"),
    ("reward.a.weight=2", "reward.a.source", "is required", "reward.a.source=b & reward.a.weight=2"),
    ("kind=[rl]", "kind", "the command is novarl rl", "kind=rl"),
    # not key=value
    ("steps=", "steps", "the value after `=` is missing", "steps=1"),
    ("rollout.stop=[a", "rollout.stop", "not a value: [a", "rollout.stop=[a]"),
    ("steps", "", "expected key=value, got 'steps'", "steps=1"),
    # contradictions
    ("data=rows.jsonl", "data", "task=sort and data=rows.jsonl are both given", "steps=1"),
    ("prompt_key=q", "prompt_key", "is a column of a data file", "steps=1"),
    ("eval.data=x", "eval.data", "has its own held-out rows", "eval.n=5"),
    ("eval.n=0 & eval_every=2", "eval_every", "turns evaluation off", "eval.n=1 & eval_every=2"),
    ("eval.n=0 & eval.k=2", "eval.k", "turns evaluation off", "eval.n=0"),
    ("resume=auto", "resume", "needs run_dir", "resume=auto & run_dir=x"),
    ("rollout.max_turns=2", "rollout.max_turns", "needs an environment", "max_turns=2 & env_path=e.py"),
    ("kl.type=loss & kl.estimator=k1", "kl.estimator", "zero expected gradient", "kl.type=reward & kl.estimator=k1"),
    ("rollout.top_p=0", "rollout.top_p", "must be above 0", "rollout.top_p=0.9"),
    ("rollout.top_k=-2", "rollout.top_k", "must be at least 0", "rollout.top_k=-1"),
    ("rollout.min_p=1", "rollout.min_p", "must be below 1", "rollout.min_p=0.1"),
    (
        "group_size=1 & baseline=group",
        "adv.estimator",
        "but responses_per_prompt is 1",
        "group_size=1 & baseline=mean",
    ),
    ("group_size=1 & baseline=loo", "adv.estimator", "but responses_per_prompt is 1", "group_size=2 & baseline=loo"),
    ("group_size=1 & dynamic_filtering=true", "dynamic_sampling.enabled", "all would be dropped", "group_size=1"),
    ("baseline=mean & adv.norm_std=true", "adv.norm_std", "no group", "baseline=group & adv.norm_std=true"),
    ("baseline=mean & ema_beta=0.5", "adv.ema_beta", "no moving average", "baseline=ema & ema_beta=0.5"),
    ("updates_per_rollout=3 & epochs_per_rollout=2", "epochs_per_rollout", "evenly", "updates_per_rollout=3"),
    (
        "prompts_per_rollout=131073",
        "prompts_per_rollout",
        "1,048,584 answers per step exceed the maximum of 1,048,576",
        "prompts_per_rollout=131072",
    ),
    ("updates_per_rollout=129", "updates_per_rollout", "128 answers per step", "updates_per_rollout=128"),
    ("min_lr_ratio=0.1", "min_lr_ratio (NovaRL: optim.min_lr_ratio)", "does not decay", "min_lr_ratio=0"),
    ("optim.min_lr_ratio=0.1", "optim.min_lr_ratio", "does not decay", "optim.min_lr_ratio=0"),
    ("kl.coef=0.1 & kl_coef=0.2", "kl.coef", "both names of kl.coef", "kl.coef=0.2 & kl_coef=0.2"),
]
ON_DATA = [
    ("prompt_key=q & messages_key=m", "messages_key", "both set the prompt column", "prompt_key=q"),
    ("task_options.a=1", "task_options", "options of a built-in task", "eval.data=x"),
    ("reward=null", "reward", "data needs a reward", "reward=null & rollout.env_path=e.py"),
    ("warmup=5", "warmup", "a data file has none", "warmup=0"),
]
OTHERS = [
    (SFTConfig, "task=sort & algo=grpo", "algo", "unknown key", "task=sort"),
    (SFTConfig, "task=sort & steps=3 & epochs=2", "epochs", "both set the length", "task=sort & steps=3"),
    (SFTConfig, "steps=3", "", "neither task nor data", "data=x & steps=3"),
    (EvalConfig, "task=sort", "model", "is required", "task=sort & model=tiny"),
    (EvalConfig, "model=m & data=x", "reward", "data needs a reward", "model=m & data=x & reward=length"),
    (
        EvalConfig,
        "model=m & task=sort & eval.k=4 & eval.temperature=0",
        "eval.k",
        "identical answers",
        "model=m & task=sort",
    ),
    (
        SampleConfig,
        "model=m & n=2 & sampling.temperature=0",
        "n",
        "identical answers",
        "model=m & sampling.temperature=0",
    ),
    (SampleConfig, "model=m & sampling.max_tokens=-1", "sampling.max_tokens", "at least 1", "model=m & prompt=null"),
]
CASES: list[tuple[type[Config], str, str, str, str]] = [
    *(
        (RLConfig, f"task=sort & {wrong}", where, what, f"task=sort & {right}")
        for wrong, where, what, right in ON_A_TASK
    ),
    *(
        (RLConfig, f"data=rows & reward=length & {wrong}", where, what, f"data=rows & reward=length & {right}")
        for wrong, where, what, right in ON_DATA
    ),
    (RLConfig, "steps=3", "", "neither task nor data is given", "steps=3 & task=sort"),
    *OTHERS,
]


@pytest.mark.parametrize(
    ("tree", "wrong", "where", "what", "right"), CASES, ids=[f"{c[0].kind}: {c[1]}" for c in CASES]
)
def test_it_is_refused_in_one_line_and_what_is_right_is_not(
    tree: type[Config], wrong: str, where: str, what: str, right: str
) -> None:
    load(tree, overrides=right.split(" & "))
    with pytest.raises(NovaError) as caught:
        load(tree, overrides=wrong.split(" & "))
    said = str(caught.value)
    assert what in said and where in (caught.value.where or "")
    assert "\n" not in said and caught.value.fix and len(said) < 300


def test_an_error_names_the_file_the_line_and_the_users_own_name(tmp_path: Path) -> None:
    def said(text: str) -> str:
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        with pytest.raises(NovaError) as caught:
            load(RLConfig, file)
        return str(caught.value).removeprefix(f"{tmp_path}/")

    misspelt = said("task: sort\noptim:\n  lr: 1e-5\n  wieght_decay: 0\nkl_coef: 3\n")
    assert misspelt == "mine.yaml:4 optim.wieght_decay: unknown key (did you mean optim.weight_decay?)"
    negative = said("task: sort\nkl_coef: -3\n")
    assert (
        negative == "mine.yaml:2 kl_coef (NovaRL: kl.coef): must be at least 0.0, got -3 (choose a value in this range)"
    )
    assert said("steps: 3\n").startswith("mine.yaml: neither task nor data")
    assert said("task: sort\nmodel: 7\n") == "mine.yaml:2 model: must be text, got 7 (put it in quotes)"
    assert said("task: sort\nreward:\n  a:\n    source: x\n    b: 1\n").startswith(
        "mine.yaml:5 reward.a.b: unknown key"
    )
    assert said("data: x\nreward: length\nwarmup: 3\n").startswith("mine.yaml:3 warmup: warmup trains on")
