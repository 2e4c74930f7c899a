"""TRL's names: what has a partner resolves, and what has none is answered by what to do instead."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from novarl.cli import _fill, main
from novarl.compose.resolve import resolve_rl
from novarl.config.base import Config
from novarl.config.describe import describe
from novarl.config.foreign.rows import Alias, Hint
from novarl.config.foreign.tables import rows
from novarl.config.keys import keys
from novarl.config.load import load
from novarl.config.names import meanings, single
from novarl.config.names_page import page
from novarl.config.tree import TREES, DPOConfig, EvalConfig, RLConfig, SFTConfig
from novarl.core.errors import NovaError, NovaErrors

GOES_WITH: dict[str, list[str]] = {
    "critic": ["algo=ppo"],
    "vine": ["algo=vineppo"],
    "adv.gamma": ["algo=ppo"],
    "adv.lam": ["algo=ppo"],
    "adv.ema_beta": ["adv.estimator=ema"],
    "kl.coef": ["kl.type=loss"],
    "kl.type": ["kl.coef=0.1"],
    "constraint_optimization": ["constraint_optimization.kl_constraint=0.5"],
    "adaptive_kl": ["kl.type=loss", "kl.coef=0.5"],
    "rollout.max_turns": ["rollout.env_path=env.py"],
    "task_options": ["task=lexical"],
    "loss.tau_pos": ["loss.surrogate=sapo"],
    "loss.tau_neg": ["loss.surrogate=sapo"],
    "kl.estimator": ["kl.type=loss", "kl.coef=0.1"],
    "kl.corrected": ["kl.type=loss", "kl.coef=0.1"],
    "optim.min_lr_ratio": ["optim.schedule=linear"],
    "chosen_key": ["data=rows.jsonl"],
    "rejected_key": ["data=rows.jsonl"],
    "answer_key": ["data=rows.jsonl", "reward=length"],
    "prompt_key": ["data=rows.jsonl", "reward=length"],
    "messages_key": ["data=rows.jsonl", "reward=length"],
    "completion_key": ["data=rows.jsonl"],
    "text_key": ["data=rows.jsonl"],
    "data": ["reward=length"],
    "eval.data": ["data=rows.jsonl", "reward=length"],
    "resume": ["run_dir=runs/x"],
    "multi_objective.method": ["multi_objective.enabled=true", "multi_objective.objectives=[reward, entropy]"],
}
"""What a key needs beside it, by its path or its section."""
ALIASES = [row for row in rows() if isinstance(row, Alias)]
HOLDS = [
    next((tree, alias) for tree in TREES.values() if single(tree, Alias).get(alias.old) is alias)
    for alias in ALIASES
    if any(single(tree, Alias).get(alias.old) is alias for tree in TREES.values())
]
"""Each alias with the first kind of run that has it."""
HINTED = [
    (TREES[kind], row)
    for row in rows()
    if isinstance(row, Hint)
    for kind in row.commands
    if len(meanings(TREES[kind]).get(row.old, ())) == 1
]


def said(tree: type[Config], *words: str) -> str:
    with pytest.raises(NovaError) as caught:
        load(tree, overrides=["task=sort", *words])
    return str(caught.value)


@pytest.mark.parametrize(("tree", "alias"), HOLDS, ids=lambda case: getattr(case, "old", None) or case.kind)
def test_the_example_of_an_alias_resolves(tree: type[Config], alias: Alias) -> None:
    beside = [
        word
        for key, words in GOES_WITH.items()
        if alias.new[0] == key or alias.new[0].startswith(f"{key}.")
        for word in words
    ]
    needed = [f"{path}={values[0]}" for path, values in alias.needs.items()]
    beside = [
        word for word in [*beside, *needed] if word.partition("=")[0] in {*keys(tree), "multi_objective.objectives"}
    ]
    preset: dict[str, Any] = {"model": "tiny"} if alias.new[0] != "model" else {}
    of_data = alias.new[0] == "data" or any(word.startswith(("data=", "task=")) for word in beside)
    if "task" in keys(tree) and not of_data:
        preset["task"] = "sort"
    config = load(tree, overrides=beside, preset={**preset, alias.old: alias.example})
    assert describe(_fill(config))


@pytest.mark.parametrize("tree", TREES.values(), ids=list(TREES))
def test_a_hint_says_what_to_do_instead(tree: type[Config]) -> None:
    """All hints of a kind of run at once: each is said, and shown in the page."""
    mine = single(tree, Hint).values()
    if not mine:
        return
    assert not {row.old for row in mine} & {*keys(tree), *single(tree, Alias)}
    with pytest.raises(NovaErrors) as caught:
        load(tree, preset={"task": "sort"}, overrides=[f"{row.old}=1" for row in mine])
    told = [f"command line {row.old}: {row.what} ({row.fix})" for row in mine]
    assert sorted(map(str, caught.value.each)) == sorted(told)
    shown = page()
    for row in mine:
        assert f"| `{row.old}` | {', '.join(row.commands)} | {row.source} | {row.what} | {row.fix} |" in shown


def test_a_name_has_one_hint_for_a_command() -> None:
    assert sum(len(single(tree, Hint)) for tree in TREES.values()) == len(HINTED)


def test_a_hinted_name_without_a_value_asks_for_nothing() -> None:
    assert load(RLConfig, preset={"task": "sort", "vllm_mode": None, "run_name": None}) == load(
        RLConfig, preset={"task": "sort"}
    )


MISLEADING = [
    ("cache_implementation=static", "its own inference engine", "attn_implementation"),
    ("vllm_importance_sampling_correction=true", "correction.type=token", "correction?"),
    ("auto_find_batch_size=true", "split and tried again", "batch_size?"),
    ("per_device_train_batch_size=8", "prompts_per_rollout", "batch_size?"),
    ("sync_ref_model=true", "kl.reference=ema", "model?"),
    ("num_train_epochs=3", "set steps", "names.md"),
    ("log_level=info", "every step is logged", "log?"),
    ("importance_sampling_level=sequence", "algo=gspo", "names.md"),
    ("top_p=2", "rollout.top_p", "eval.top_p"),
    ("use_vllm=true", "vLLM is not supported yet", "names.md"),
    ("fp16=true", "dtype=bfloat16", "names.md"),
    ("report_to=comet_ml", "report_to (NovaRL: log.trackers)", "names.md"),
    ("loss_type=dr_grpo", "dr_grpo is an algorithm (set algo=dr_grpo)", "not supported"),
    ("loss_type=cispo", "cispo is a surrogate (set loss.surrogate=cispo)", "not supported"),
    ("loss_type=luspo", "'luspo' is not supported (set loss.agg ", "dr_grpo"),
    ("scale_rewards=batch", "algo=reinforce_pp", "names.md"),
]


@pytest.mark.parametrize(("word", "answer", "never"), MISLEADING, ids=lambda case: case)
def test_a_name_of_another_meaning_is_never_proposed(word: str, answer: str, never: str) -> None:
    assert answer in said(RLConfig, word) and never not in said(RLConfig, word)


@pytest.mark.parametrize(
    ("tree", "words", "expected"),
    [
        (RLConfig, ["beta=0.04"], {"kl.coef": 0.04, "kl.type": "loss"}),
        (RLConfig, ["beta=0.04", "kl.type=reward"], {"kl.coef": 0.04, "kl.type": "reward"}),
        (RLConfig, ["beta=0"], {"kl.coef": 0, "kl.type": None}),
        (RLConfig, ["beta=null"], {"kl.coef": None, "kl.type": None}),
        (DPOConfig, ["beta=0.3", "loss_type=ipo"], {"beta": 0.3, "loss": "ipo"}),
        (RLConfig, ["max_prompt_length=100"], {"max_length": 100, "on_long": "truncate"}),
        (RLConfig, ["max_prompt_length=100", "on_long=refuse"], {"max_length": 100, "on_long": "refuse"}),
        (RLConfig, ["num_iterations=3", "beta=0"], {"epochs_per_rollout": 3, "updates_per_rollout": 3}),
        (
            RLConfig,
            ["num_iterations=2", "num_generations=4", "updates_per_rollout=4"],
            {"epochs_per_rollout": 2, "updates_per_rollout": 4},
        ),
        (RLConfig, ["delta=4", "algo=grpo"], {"clip.dual": 4.0}),
        (RLConfig, ["sapo_temperature_pos=2", "loss.surrogate=sapo"], {"loss.tau_pos": 2.0, "loss.tau_neg": 1.05}),
        (RLConfig, ["mask_truncated_completions=true"], {"loss.mask_truncated": True}),
        (RLConfig, ["epsilon=0.1"], {"clip.low": 0.1, "clip.high": 0.1}),
        (RLConfig, ["epsilon=0.1", "epsilon_high=0.3"], {"clip.low": 0.1, "clip.high": 0.3}),
        (RLConfig, ["loss_type=grpo"], {"loss.agg": "sequence"}),
        (RLConfig, ["loss_type=bnpo"], {"loss.agg": "token"}),
        (RLConfig, ["scale_rewards=group"], {"adv.norm_std": True}),
        (RLConfig, ["scale_rewards=none", "algo=grpo"], {"adv.norm_std": False}),
        (RLConfig, ["bf16=true", "fp16=false"], {"dtype": "bfloat16"}),
        (SFTConfig, ["bf16=false"], {"dtype": "float32"}),
        (SFTConfig, ["report_to=tensorboard", "save_total_limit=5"], {"log.tensorboard": True, "keep": 5}),
        (RLConfig, ["report_to=none"], {"log.tensorboard": False, "log.trackers": ()}),
        (RLConfig, ["report_to=[wandb,tensorboard]"], {"log.tensorboard": True, "log.trackers": ("wandb",)}),
        (
            RLConfig,
            ["report_to=trackio,mlflow", "run_name=a"],
            {"log.trackers": ("trackio", "mlflow"), "log.run_name": "a"},
        ),
        (SFTConfig, ["resume_from_checkpoint=true", "run_dir=x"], {"resume": "auto"}),
        (SFTConfig, ["resume_from_checkpoint=false"], {"resume": None}),
        (SFTConfig, ["resume_from_checkpoint=runs/x/checkpoints/step-1"], {"resume": "runs/x/checkpoints/step-1"}),
        (SFTConfig, ["attn_implementation=eager"], {"attn": "eager"}),
        (SFTConfig, ["lr_scheduler_type=constant_with_warmup"], {"optim.schedule": "constant"}),
    ],
)
def test_what_a_name_comes_to(tree: type[Config], words: list[str], expected: dict[str, Any]) -> None:
    config = _fill(load(tree, overrides=["task=sort", *words]))
    for path, value in expected.items():
        found: Any = config
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value, path


def test_two_names_of_one_key_are_a_conflict() -> None:
    assert "both names of dtype but have different values" in said(RLConfig, "bf16=true", "dtype=float32")
    assert "both names of kl.coef but have different values" in said(RLConfig, "beta=0.1", "kl.coef=0.2")


def test_a_value_without_a_partner_is_not_mistaken_for_one() -> None:
    for tree, alias in HOLDS:
        if alias.values:
            with pytest.raises(NovaError, match="1 is not supported"):
                load(tree, preset={"task": "sort", "model": "tiny", alias.old: 1})
    assert "use one of these" in said(RLConfig, "lr_scheduler_type=cosine_with_restarts")


def test_how_a_list_is_written() -> None:
    assert said(SFTConfig, "lora.target=q_proj,v_proj").endswith(
        "must be all-linear or list, got 'q_proj,v_proj' (write lists in brackets: lora.target=[q_proj,v_proj])"
    )
    assert "lora.target=[q_proj,v_proj]" in said(SFTConfig, "lora.target=3")


def weights_of(*words: str, file: Path | None = None) -> dict[str, tuple[str, float]]:
    reward = load(RLConfig, file, ["task=sort", *words]).reward
    return {name: (spec.source, spec.weight) for name, spec in (reward or {}).items()}


def test_several_reward_functions_and_their_weights(tmp_path: Path) -> None:
    both = {"x": ("a.py:x", 1.0), "y": ("b.py:y", 1.0)}
    weighed = {"x": ("a.py:x", 1.0), "y": ("b.py:y", 0.5)}
    assert weights_of("reward_funcs=[a.py:x,b.py:y]") == both
    assert weights_of("reward_funcs=[a.py:x,b.py:y]", "reward_weights=[1, 0.5]") == weighed
    assert weights_of("reward_weights=[1, 0.5]", "reward_funcs=[a.py:x,b.py:y]") == weighed
    assert weights_of("reward_funcs=a.py:x", "reward_weights=[2]") == {"x": ("a.py:x", 2.0)}
    file = tmp_path / "c.yaml"
    file.write_text("reward_weights: [1, 0.5]\nreward_funcs: [a.py:x, 'b.py:y']\n")
    assert weights_of(file=file) == weighed
    assert weights_of("reward.x.weight=3", file=file)["x"] == ("a.py:x", 3.0)
    assert weights_of("reward_weights=[1, 1]", file=file) == both
    assert weights_of("reward.x.weight=3", "reward_weights=[1, 1]", file=file) == both, "later values win"
    assert weights_of("reward_funcs=[a.py:x]", "reward.x.weight=3") == {"x": ("a.py:x", 3.0)}
    assert weights_of("reward=length", file=file) == {"length": ("length", 1.0)}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["reward_weights=[1]"], "needs reward_funcs"),
        (["reward_funcs=[a.py:x]", "reward_weights=[1, 2]"], "one weight per function"),
        (["reward_funcs=[a.py:x]", "reward_weights=1"], "one weight per function"),
        (["reward_funcs=[a.py:x, b.py:x]"], "functions with different names"),
        (["reward_funcs=[1]"], "functions with different names"),
        (["reward.x.weight=3", "reward_funcs=[a.py:x]"], "both set the rewards"),
        (["reward_funcs=[a.py:x]", "reward=length"], "both set the rewards"),
        (["reward_funcs=[]"], "functions with different names"),
        (["reward=[a.py:x,b.py:y]"], "reward.a.source=a.py:x reward.b.source=b.py:y reward.b.weight=0.5"),
        (["reward={a:{source:rew.py:one,weight:1}}"], "reward.a: 'source:rew.py:one' is a key without a value"),
        (["reward={a:{source:rew.py:one,weight:1}}"], "(write source: rew.py:one)"),
    ],
)
def test_rewards_that_cannot_be_read(words: list[str], what: str) -> None:
    assert what in said(RLConfig, *words)


def test_a_colon_without_a_space_is_shown_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("task: sort\nreward: {a: {source:length}}\n")
    with pytest.raises(NovaError) as caught:
        load(RLConfig, file)
    assert str(caught.value).startswith(f"{file}:2 reward.a: 'source:length' is a key without a value")


def test_all_that_cannot_be_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text("task: sort\nfp16: true\nlogging_steps: 5\nlog_level: info\nlr: 1e-5\noptim:\n  lrr: 1\n")
    with pytest.raises(NovaErrors) as caught:
        load(RLConfig, file, ["stepz=3", "epsilom=1"])
    assert str(caught.value) == "; ".join(map(str, caught.value.each)) and len(caught.value.each) == 5
    assert main(["explain", "rl", str(file), "stepz=3"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.removeprefix(f"novarl: {file}:").partition(":")[0] for line in told[:3]] == [
        "2 fp16",
        "4 log_level",
        "7 optim.lrr",
    ]
    assert told[3:] == ["novarl: command line stepz: unknown key (did you mean steps?)"]


def test_a_name_of_another_command_says_whose_it_is() -> None:
    assert said(SFTConfig, "beta=0.1").endswith("unknown key (only novarl rl, dpo, rm has it: remove it)")
    for word in ("temperature=0.7", "n=3"):  # which other commands have too, but not here
        assert said(EvalConfig, word).endswith(f"unknown key (did you mean eval.{word.partition('=')[0]}?)")
    assert said(SFTConfig, "num_generations=4").endswith("(only novarl rl has it: remove it)")
    assert "| `num_train_epochs` | `epochs` | sft, dpo, rm | TRL |" in page()


@pytest.mark.parametrize(
    "name", ["top_k", "min_p", "fp16", "bf16", "ref_model", "save_total_limit", "beta", "report_to"]
)
def test_null_is_unset_as_in_a_dump_of_trls_settings(name: str) -> None:
    plain = load(RLConfig, preset={"task": "sort"})
    assert load(RLConfig, preset={"task": "sort", name: None}) == plain
    assert load(RLConfig, preset={"task": "sort", "max_steps": -1}) == plain


def test_what_a_name_implies_goes_with_its_value() -> None:
    def given(first: dict[str, Any], *words: str) -> RLConfig:
        return load(RLConfig, preset={"task": "sort", **first}, overrides=list(words))

    assert given({"num_iterations": 4, "num_generations": 8}).updates_per_rollout == 4
    assert given({"num_iterations": 4, "num_generations": 8}, "epochs_per_rollout=1") == given(
        {"num_generations": 8}, "epochs_per_rollout=1"
    )
    assert given({"num_iterations": 4, "num_generations": 8}, "num_iterations=2").updates_per_rollout == 2
    assert given({"beta": 0.04}).kl.type == "loss"
    for off in ("beta=0", "kl.coef=0"):
        assert given({"beta": 0.04}, off).kl.type is None
    assert given({"beta": 0.04}, "kl.coef=0.1").kl.type == "loss", "another price is paid at the same place"


def test_several_mistakes_travel_between_processes() -> None:
    both = NovaErrors([NovaError("one", where="a", fix="x"), NovaError("two")])
    assert str(pickle.loads(pickle.dumps(both))) == str(both) == "a: one (x); two"
    assert len(pickle.loads(pickle.dumps(both)).each) == 2


def test_the_algorithm_that_is_nearest_to_trls_defaults() -> None:
    """TRL 1.16: loss_type=dapo, scale_rewards=group, beta=0, epsilon=0.2, one update of a rollout."""
    assert "`algo=grpo loss.agg=token kl.coef=0`" in page()
    row = resolve_rl(load(RLConfig, overrides=["task=sort", "algo=grpo", "loss.agg=token", "kl.coef=0"])).algorithm
    assert (row.estimator, row.surrogate, row.aggregation) == ("group", "ppo_clip", "token")
    assert row.options == {"adv.norm_std": True, "clip.low": 0.2, "clip.high": 0.2}
    assert (row.kl_coef, row.updates_per_rollout) == (0.0, 1)
    assert resolve_rl(load(RLConfig, overrides=["task=sort"])).algorithm.name == "dr_grpo"
