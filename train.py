"""The RLHF Systems Kit's command line over NovaRL's configuration; anything else is passed on as key=value.

python train.py --epochs 2 --steps_per_epoch 6 --batch_size 2 --max_new_tokens 10
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from novarl.cli import main
from novarl.models.byte_tokenizer import ByteTokenizer

BUILT_IN = ("tiny", "small")
BYTES_PER_TOKEN = 5
"""Of GPT-2, the kit's model, in English. A token of a built-in model is one byte."""
WARMUP = 100
"""Supervised steps before RL: the built-in models are untrained, and GPT-2 is not."""

parser = argparse.ArgumentParser(
    description="PPO on the sentiment task with the kit's flags. Any other key of novarl rl works too: key=value."
)
parser.add_argument("--epochs", type=int, default=3, help="default 3; a run has epochs * steps_per_epoch steps")
parser.add_argument("--steps_per_epoch", type=int, default=8, help="default 8")
parser.add_argument("--batch_size", type=int, default=4, help="prompts (not answers) in a step; default 4")
parser.add_argument("--responses_per_prompt", type=int, default=8, help="answers sampled to each prompt; default 8")
parser.add_argument(
    "--max_new_tokens",
    type=int,
    default=15,
    help="longest answer, in tokens of GPT-2; default 15. A token of a built-in model is one byte, so such a model may "
    f"write {BYTES_PER_TOKEN} times as many of its own",
)
parser.add_argument("--seed", type=int, default=42, help="default 42")
parser.add_argument(
    "--learning_rate", type=float, help="default 3e-4 for a built-in model, 1e-6 for a large one (the kit's is 1e-5)"
)
parser.add_argument("--kl_coef", type=float, default=0.1, help="weight of the KL penalty; default 0.1")
parser.add_argument("--device", default="auto", help="auto, cpu or cuda; default auto")
parser.add_argument("--model", default="tiny", help="tiny, small, or the directory of a model; default tiny")
parser.add_argument(
    "--warmup", type=int, help=f"supervised steps before RL; default {WARMUP} for a built-in model, else 0"
)


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The kit's flags, written --name value or name=value, and the words that are for novarl rl."""
    known = vars(parser.parse_args([]))
    return parser.parse_known_args([f"--{word}" if word.partition("=")[0] in known else word for word in words])


def translate(flags: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The settings by their names in novarl rl, and in words what the kit's numbers mean here."""
    settings = {name: value for name, value in vars(flags).items() if value is not None}
    longest = f"{flags.max_new_tokens} tokens"
    if flags.model in BUILT_IN:
        settings.setdefault("warmup", WARMUP)
    if flags.model in BUILT_IN or ByteTokenizer.read(Path(flags.model)) is not None:
        settings["max_new_tokens"] = BYTES_PER_TOKEN * flags.max_new_tokens
        longest = f"{settings['max_new_tokens']} bytes (for max_new_tokens={flags.max_new_tokens} of GPT-2)"
    meaning = (
        f"PPO on task=sentiment, {flags.epochs} x {flags.steps_per_epoch} steps\n"
        f"A step: {flags.batch_size} prompts (batch_size) with {flags.responses_per_prompt} answers each, "
        f"of at most {longest}"
    )
    return settings, meaning


if __name__ == "__main__":
    flags, rest = parse(sys.argv[1:])
    settings, meaning = translate(flags)
    print(meaning, flush=True)
    sys.exit(main(["rl", "task=sentiment", "algo=ppo_clip", *(f"{k}={v}" for k, v in settings.items()), *rest]))
