"""What each recipe's counterpart in the library is told: `benchmarks/recipes.py` runs the two side by side."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

REWARDS = Path(__file__).with_name("recipe_rewards.py")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Twin:
    """A recipe and what the library is to be told of it.

    start       the recipe whose `--num-epochs 0` makes the model that both go on from
    flags       of the recipe, so that no batch is cut short and a run takes half a minute
    task        flags that make the task a short one; the start is made with them too
    judged      flags of the evaluation
    answers     how many sampled answers that is, and so how exact a score can be
    command     the library's, and `settings(args)` its configuration by the recipe's own arguments
    rows        (module, args, start) -> training rows
    """

    recipe: str
    start: str
    flags: str
    judged: str
    answers: int
    command: str
    settings: Callable[[Namespace], dict[str, Any]]
    rows: Callable[[ModuleType, Namespace, Path], list[Row]]
    task: str = ""


def asked(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def sorting(module: ModuleType, args: Namespace, _: Path) -> list[Row]:
    """The problems of all epochs, with the letters in the order in which the recipe will see them."""
    rng = random.Random(args.seed)
    rows = [row for _ in range(args.num_epochs) for row in module.problems("train", rng)]
    return [{"messages": asked(prompt), "answer": answer} for prompt, answer in rows]


def demonstrated(module: ModuleType, args: Namespace, start: Path) -> list[Row]:
    found = sorting(module, args, start)
    return [{"messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]} for row in found]


def writing(module: ModuleType, args: Namespace, _: Path) -> list[Row]:
    return [{"messages": asked(prompt)} for _ in range(args.num_epochs) for prompt in module.topics("train", args)]


def preferred(prompt: str, chosen: str, rejected: str) -> Row:
    both = {"chosen": chosen, "rejected": rejected}
    return {"prompt": asked(prompt)} | {side: [{"role": "assistant", "content": both[side]}] for side in both}


def compared(module: ModuleType, args: Namespace, start: Path) -> list[Row]:
    """The pairs that the recipe will sample: what it does before, done once more with the same generator."""
    import torch

    torch.manual_seed(args.seed)
    model, tokenizer = module.load(str(start))
    module.evaluate(model, tokenizer, args)
    tokens, attention, mask, _ = module.collect(model, tokenizer, args)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    prompts = [decode(row[keep]).rstrip("\n") for row, keep in zip(tokens, attention & ~mask, strict=True)]
    texts = [decode(row[keep]) for row, keep in zip(tokens, mask, strict=True)]
    return [preferred(*sides) for sides in zip(prompts[::2], texts[::2], texts[1::2], strict=True)]


def ranked(module: ModuleType, args: Namespace, _: Path) -> list[Row]:
    return [preferred(*row) for row in module.pairs("train", args.num_pairs, args)]


def optim(args: Namespace, **changes: Any) -> dict[str, Any]:
    """As in the recipes: torch's own AdamW."""
    return {"lr": args.learning_rate, "betas": [0.9, 0.999], "max_grad_norm": args.grad_clip, **changes}


def online(args: Namespace, *, reward: str, algo: str, samples: int = 1, **changes: Any) -> dict[str, Any]:
    """A recipe with sampling in it. All its updates are on the whole batch."""
    updates = getattr(args, "updates_per_batch", 1)
    return {
        "algo": algo,
        "reward": f"{REWARDS}:{reward}",
        "prompts_per_rollout": args.batch_size,
        "responses_per_prompt": samples,
        "updates_per_rollout": updates,
        "epochs_per_rollout": updates,
        "rollout": {"max_tokens": args.max_new_tokens, "temperature": args.temperature},
        "eval": {"n": 1},
        "optim": optim(args),
        **changes,
    }


def offline(args: Namespace, **changes: Any) -> dict[str, Any]:
    return {"batch_size": args.batch_size, "eval": {"n": 1}, "optim": optim(args), **changes}


SORT: dict[str, Any] = {"judged": "--eval-size 1024", "answers": 1024}
WRITE: dict[str, Any] = {"judged": "--eval-samples 20 --max-new-tokens 36", "answers": 400, "task": "--num-words 5"}
TWINS = (
    Twin(
        "sft",
        start="sft",
        flags="--batch-size 88 --num-epochs 40",
        command="sft",
        settings=lambda args: offline(args, optim=optim(args, schedule="linear")),
        rows=demonstrated,
        **SORT,
    ),
    Twin(
        "reinforce",
        start="rloo",
        flags="--baseline mean --batch-size 20 --num-epochs 15 --learning-rate 1e-3",
        command="rl",
        settings=lambda args: online(args, reward="richness", algo="reinforce", adv={"estimator": args.baseline}),
        rows=writing,
        **WRITE,
    ),
    Twin(
        "rloo",
        start="rloo",
        flags="--batch-size 6 --num-epochs 5",
        command="rl",
        settings=lambda args: online(args, reward="richness", algo="rloo", samples=args.group_size),
        rows=writing,
        **WRITE,
    ),
    Twin(
        "grpo",
        start="grpo",
        flags="--num-epochs 5",
        command="rl",
        settings=lambda args: online(
            args,
            reward="sorted_letters",
            algo="grpo",
            samples=args.group_size,
            clip={"low": args.clip},
            kl={"coef": args.kl_coef},
        ),
        rows=sorting,
        **SORT,
    ),
    Twin(
        "ppo",
        start="grpo",
        flags="--batch-size 88",
        command="rl",
        settings=lambda args: online(
            args,
            reward="sorted_letters",
            algo="ppo",
            clip={"low": args.clip},
            kl={"coef": args.kl_coef},
            adv={"gamma": args.gamma, "lam": args.lam},
            critic={"lr": args.critic_learning_rate},
        ),
        rows=sorting,
        **SORT,
    ),
    Twin(
        "vineppo",
        start="grpo",
        flags="--batch-size 44",
        command="rl",
        settings=lambda args: online(
            args,
            reward="sorted_letters",
            algo="vineppo",
            clip={"low": args.clip},
            vine={"samples": args.continuations, "split": args.step_end},
        ),
        rows=sorting,
        **SORT,
    ),
    Twin(
        "prime",
        start="grpo",
        flags="",
        command="rl",
        settings=lambda args: online(
            args,
            reward="sorted_letters",
            algo="prime",
            samples=args.group_size,
            clip={"low": args.clip},
            prime={"beta": args.beta, "lr": args.reward_learning_rate},
        ),
        rows=sorting,
        **SORT,
    ),
    Twin(
        "dpo",
        start="rloo",
        flags="",
        command="dpo",
        settings=lambda args: offline(args, beta=args.beta, epochs=float(args.num_epochs)),
        rows=compared,
        **WRITE,
    ),
    Twin(
        "reward_model",
        start="rloo",
        flags="--num-pairs 1536",
        command="rm",
        settings=lambda args: offline(args, centring=args.centring, epochs=float(args.num_epochs)),
        rows=ranked,
        judged="--eval-pairs 1024",
        answers=1024,
        task="--num-words 5",
    ),
)
