"""The command line's flags: bare ones mean true, none takes a word that is not its own."""

from __future__ import annotations

import pytest

from novarl.config.base import Config
from novarl.config.flags import arguments
from novarl.config.load import load
from novarl.config.tree import RLConfig, SFTConfig
from novarl.core.errors import NovaError

READ = [
    (RLConfig, "--gradient_checkpointing --model_id tiny", "gradient_checkpointing=true model_id=tiny"),
    (RLConfig, "--gradient-checkpointing c.yaml", "gradient_checkpointing=true c.yaml"),
    (RLConfig, "c.yaml --compile steps=3", "c.yaml compile=true steps=3"),
    (RLConfig, "--compile false --seed 3", "compile=false seed=3"),
    (RLConfig, "--compile=False", "compile=false"),
    (RLConfig, "--compile 1 --micro.gradient_checkpointing 0", "compile=true micro.gradient_checkpointing=false"),
    (RLConfig, "--no-compile --no_gradient_checkpointing", "compile=false gradient_checkpointing=false"),
    (RLConfig, "--no-apply-chat-template c.yaml", "apply_chat_template=false c.yaml"),
    (RLConfig, "--dynamic_sampling --steps 3", "dynamic_sampling=true steps=3"),
    (RLConfig, "--reward_funcs a.py:x b.py:y --seed 1", "reward_funcs=[a.py:x,+b.py:y] seed=1"),
    (RLConfig, "--reward_weights 1.0 0.5", "reward_weights=[1.0,+0.5]"),
    (RLConfig, "--eps_clip_low_high 0.2 0.27 --use_kl_loss", "eps_clip_low_high=[0.2,+0.27] use_kl_loss=true"),
    (RLConfig, "--adam_betas 0.9 0.95 --packing_samples c.yaml", "adam_betas=[0.9,+0.95] packing_samples=true c.yaml"),
    (RLConfig, "--reward_funcs a.py:x c.yaml", "reward_funcs=a.py:x c.yaml"),
    (RLConfig, "--lora_target_modules q_proj, v_proj --seed=1", "lora_target_modules=[q_proj,+v_proj] seed=1"),
    (RLConfig, "--lora_target_modules all-linear steps=2", "lora_target_modules=all-linear steps=2"),
    (RLConfig, "--lora.target [q_proj,v_proj]", "lora.target=[q_proj,v_proj]"),
    (RLConfig, "--rollout.stop END STOP", "rollout.stop=[END,+STOP]"),
    (RLConfig, "--config c.yaml --seed 1", "c.yaml seed=1"),
    (RLConfig, "--config=c.yaml", "c.yaml"),
    (RLConfig, "--data a=b.jsonl c.yaml", "data=a=b.jsonl c.yaml"),
    (RLConfig, "--optim.lr -1", "optim.lr=-1"),
    (RLConfig, "--bf16 --use_vllm --seed 1", "bf16=true use_vllm=true seed=1"),
    (SFTConfig, "--packing --max_steps 3", "packing=true max_steps=3"),
    (SFTConfig, "--packing c.yaml", "packing=true c.yaml"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "given", "expected"), READ, ids=lambda case: case if isinstance(case, str) else "")
def test_what_a_command_line_is_read_as(tree: type[Config], given: str, expected: str) -> None:
    """`+` stands for a blank within a value."""
    path, overrides = arguments(given.split(), tree)
    words = [word.replace("+", " ") for word in expected.split()]
    assert overrides == [word for word in words if "=" in word]
    assert path == next((word for word in words if "=" not in word), None)


def test_a_bare_flag_does_what_true_does() -> None:
    path, overrides = arguments(["--gradient_checkpointing", "--task", "sort", "--no-apply-chat-template"], RLConfig)
    config = load(RLConfig, path, overrides)
    assert (config.micro.gradient_checkpointing, config.task, config.apply_chat_template) == (True, "sort", False)


def test_several_rewards_are_a_list_with_their_weights() -> None:
    words = ["--task", "sort", "--reward_funcs", "a.py:x", "b.py:y", "--reward_weights", "1.0", "0.5"]
    reward = load(RLConfig, *arguments(words, RLConfig)).reward
    assert reward is not None
    assert {name: (spec.source, spec.weight) for name, spec in reward.items()} == {
        "x": ("a.py:x", 1.0),
        "y": ("b.py:y", 0.5),
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--seed --compile", "command line: --seed needs a value (write seed=value)"),
        ("a.yaml --config b.yaml", "the configuration file is already a.yaml"),
        ("--gradient_checkpointing a.yaml b.yaml", "the configuration file is already a.yaml"),
    ],
)
def test_what_has_no_place_is_refused(given: str, said: str) -> None:
    with pytest.raises(NovaError) as caught:
        arguments(given.split(), RLConfig)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--gradient_checkpoint tiny", "unknown key (did you mean micro.gradient_checkpointing?)"),
        ("--stepz", "unknown key (did you mean steps?)"),
        ("--compile=maybe", "compile: must be true or false, got 'maybe'"),
    ],
)
def test_an_unknown_or_wrong_flag_says_which(given: str, said: str) -> None:
    with pytest.raises(NovaError) as caught:
        load(RLConfig, *arguments(["task=sort", *given.split()], RLConfig))
    assert said in str(caught.value)
