"""What TRL's documentation shows of data rows and reward functions, typed anew: the cases of docs/from_trl.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RowCase:
    """A documented row, and the commands that are for it (with their own words)."""

    name: str
    row: dict[str, Any]
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RewardCase:
    """A documented reward function: a file's code, the words that name it, and rows to answer."""

    name: str
    code: str
    words: tuple[str, ...]
    rows: list[dict[str, Any]] = field(default_factory=lambda: [{"prompt": "The sky is"}, {"prompt": "The sun is"}])


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASK, RIGHT, WRONG = said("user", "Which color is the sky?"), said("assistant", "Blue."), said("assistant", "Green.")
CALL = {"type": "function", "function": {"name": "set_lamp", "arguments": {"room": "kitchen", "on": True}}}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "description": "Switch a lamp on or off.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "string"}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
        },
    },
}
CALLS = [
    said("user", "Light in the kitchen, please."),
    {"role": "assistant", "tool_calls": [CALL]},
    said("tool", "The kitchen is lit.", name="set_lamp"),
    said("assistant", "Done!"),
]
PICTURE = {"bytes": "iVBORw0K", "path": "sky.png"}
SEEN = said("user", [{"type": "image"}, {"type": "text", "text": "Which color is this?"}])
STEPS = {
    "prompt": "Is 9.8 more than 9.11?",
    "completions": ["0.8 is more than 0.11.", "So yes."],
    "labels": [True, True],
}
OWN_TEMPLATE = "chat_template=harmony.jinja"
HARMONY = """\
{{- model_identity }} Reasoning: {{ reasoning_effort }}
{% for message in messages -%}
<|{{ message.role }}|>
{%- if message.thinking %}[analysis] {{ message.thinking }} [final] {% endif %}{{ message.content }}{{ eos_token }}
{% endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""A template as gpt-oss has it, in small."""
PAIRED = ("dpo", "rm loss=bt")
LABELLED = ("dpo loss=kto", "rm loss=bce")

ROWS = [
    RowCase("language modeling, text", {"text": "The sky is blue."}, ("sft",)),
    RowCase("language modeling, messages", {"messages": [ASK, RIGHT]}, ("sft",)),
    RowCase("prompt only, text", {"prompt": "The sky is"}, ("rl",)),
    RowCase("prompt only, messages", {"prompt": [ASK]}, ("rl",)),
    RowCase("prompt and completion, text", {"prompt": "The sky is", "completion": " blue."}, ("sft",)),
    RowCase("prompt and completion, messages", {"prompt": [ASK], "completion": [RIGHT]}, ("sft",)),
    RowCase("preference, text", {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, PAIRED),
    RowCase("preference, messages", {"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]}, PAIRED),
    RowCase(
        "preference, prompt implicit, text", {"chosen": "The sky is blue.", "rejected": "The sky is green."}, PAIRED
    ),
    RowCase("preference, prompt implicit, messages", {"chosen": [ASK, RIGHT], "rejected": [ASK, WRONG]}, PAIRED),
    RowCase("preference, for the KTO trainer", {"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]}, LABELLED),
    RowCase("unpaired preference, text", {"prompt": "The sky is", "completion": " blue.", "label": True}, LABELLED),
    RowCase("unpaired preference, messages", {"prompt": [ASK], "completion": [WRONG], "label": False}, LABELLED),
    RowCase("stepwise supervision", STEPS, ("sft", "rm loss=bce")),
    RowCase("tokenized language modeling", {"input_ids": [1, 2, 3]}, ("sft",)),
    RowCase("tool calls", {"messages": CALLS, "tools": [SCHEMA]}, ("sft",)),
    RowCase("tool calls, tools as JSON text", {"messages": CALLS, "tools": "SCHEMAS"}, ("sft",)),
    RowCase("tool calls, prompt only", {"prompt": CALLS[:1], "tools": [SCHEMA]}, ("rl",)),
    RowCase(
        "tool calls, preference",
        {"prompt": CALLS[:1], "chosen": [CALLS[1]], "rejected": [WRONG], "tools": [SCHEMA]},
        PAIRED,
    ),
    RowCase(
        "Harmony: developer, thinking, template arguments",
        {
            "messages": [said("developer", "Be kind."), ASK, said("assistant", "Blue.", thinking="Look up.")],
            "chat_template_kwargs": {"reasoning_effort": "low", "model_identity": "You are kind."},
        },
        ("sft", f"sft {OWN_TEMPLATE}"),
    ),
    RowCase("vision: image beside messages", {"messages": [ASK, RIGHT], "image": PICTURE}, ("sft",)),
    RowCase("vision: images, prompt only", {"prompt": [ASK], "images": [PICTURE]}, ("rl",)),
    RowCase("vision: image part in a message", {"prompt": [SEEN], "completion": [RIGHT], "images": []}, ("sft",)),
    RowCase(
        "vision: preference with images",
        {"prompt": [SEEN], "chosen": [RIGHT], "rejected": [WRONG], "images": [PICTURE]},
        PAIRED,
    ),
    RowCase(
        "vision: a row of text parts only",
        {
            "prompt": [said("user", [{"type": "text", "text": "Capital of France?"}])],
            "completion": [RIGHT],
            "images": [],
        },
        ("sft",),
    ),
]

LENGTHS = """def reward_func(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]
"""
CHARACTERS = """def reward_func(completions, **kwargs):
    return [float(len(text)) for text in completions]
"""
FORMAT = r"""import re

def reward_func(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) is not None) for text in texts]
"""
REFERENCE = r"""import re

def reward_func(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
    return [float(match is not None and match[1] == truth) for match, truth in zip(found, ground_truth)]
"""
TASKS = """def sums(prompts, completions, task, **kwargs):
    return [float(len(text)) if kind == "math" else None for text, kind in zip(completions, task)]

def code(prompts, completions, task, **kwargs):
    return [float("def" in text) if kind == "code" else None for text, kind in zip(completions, task)]
"""
LATER = """import asyncio

async def reward_func(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]
"""
LOGGING = """def reward_func(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    right = [float(truth in text) for text, truth in zip(completions, ground_truth)]
    if log_extra:
        log_extra("golden_answer", list(ground_truth))
    if log_metric:
        log_metric("accuracy", sum(right) / len(right))
    return right
"""
CURRICULUM = """def reward_func(completions, trainer_state, **kwargs):
    share = trainer_state.global_step / trainer_state.max_steps
    return [share * len(completion) for completion in completions]
"""
EPOCHS = """def reward_func(completions, trainer_state, **kwargs):
    return [trainer_state.epoch for completion in completions]
"""
EVERYTHING = """def reward_func(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, level):
    return [float(n) for n in level]
"""
KWARGS = """def reward_func(**kwargs):
    return [float(len(completion)) for completion in kwargs["completions"]]
"""
ENVIRONMENTS = """def reward_func(completions, environments):
    return [environment.counter for environment in environments]
"""
CLOSURE = """def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    def soft_overlong_punishment_reward(completion_ids, **kwargs):
        begin = max_completion_len - soft_punish_cache
        return [-min(1.0, max(0.0, (len(ids) - begin) / soft_punish_cache)) for ids in completion_ids]
    return soft_overlong_punishment_reward

overlong = get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)
"""
TRUTHS = [{"prompt": "2 + 2?", "ground_truth": "4"}, {"prompt": "3 + 3?", "ground_truth": "6"}]
SHAPING = "reward.get_soft_overlong_punishment"
MIXED = [{"prompt": "2 + 2?", "task": "math"}, {"prompt": "A function that adds.", "task": "code"}]
MINE = ("reward=mine.py:reward_func",)

REWARDS = [
    RewardCase("example 1: length in tokens", LENGTHS, MINE),
    RewardCase("example 1.1: length in characters", CHARACTERS, MINE),
    RewardCase("example 2: a format, of messages", FORMAT, MINE, [{"prompt": [ASK]}, {"prompt": [ASK]}]),
    RewardCase("example 3: a reference column", REFERENCE, MINE, TRUTHS),
    RewardCase("example 3, where the column is missing", REFERENCE, MINE, [{"prompt": "2 + 2?", "solution": "4"}] * 2),
    RewardCase(
        "example 4: None where a task is not meant",
        TASKS,
        ("reward.sums.source=mine.py:sums", "reward.code.source=mine.py:code"),
        MIXED,
    ),
    RewardCase(
        "example 4, where no function applies", TASKS, ("reward=mine.py:code",), [{"prompt": "?", "task": "x"}] * 2
    ),
    RewardCase("example 5: async", LATER, MINE),
    RewardCase("example 6: log_extra and log_metric", LOGGING, MINE, TRUTHS),
    RewardCase("trainer_state, of which global_step and max_steps", CURRICULUM, MINE),
    RewardCase("trainer_state, anything else of it", EPOCHS, MINE),
    RewardCase("every documented argument by name", EVERYTHING, MINE, [{"prompt": "2 + 2?", "level": 1}] * 2),
    RewardCase("`**kwargs` alone", KWARGS, MINE),
    RewardCase("environments", ENVIRONMENTS, MINE),
    RewardCase(
        "several functions, weighted",
        CHARACTERS + LENGTHS.replace("reward_func", "tokens"),
        (
            *("reward.characters.source=mine.py:reward_func", "reward.characters.weight=0.5"),
            *("reward.tokens.source=mine.py:tokens", "reward.tokens.weight=2"),
        ),
    ),
    RewardCase("a function made by a function, as overlong punishment", CLOSURE, ("reward=mine.py:overlong",)),
    RewardCase("an environment's own `get_reward`", "", ("reward=environment",)),
    RewardCase(
        "`get_soft_overlong_punishment`, built in",
        "",
        (f"{SHAPING}.max_completion_len=4", f"{SHAPING}.soft_punish_cache=2"),
    ),
    RewardCase("`get_soft_overlong_punishment` without limits", "", ("reward=get_soft_overlong_punishment",)),
    RewardCase("`get_repetition_penalty_reward`, built in", "", ("reward=get_repetition_penalty_reward",)),
    RewardCase("`accuracy_reward` by name", "", ("reward=accuracy_reward",)),
    RewardCase("`reasoning_accuracy_reward` by name", "", ("reward=reasoning_accuracy_reward",)),
    RewardCase("`think_format_reward` by name", "", ("reward=think_format_reward",)),
    RewardCase("`get_cosine_scaled_reward` by name", "", ("reward=get_cosine_scaled_reward",)),
    RewardCase("a reward model", "", ("reward=model:MODEL",)),
]
