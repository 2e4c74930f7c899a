"""The RLHF Systems Kit's command line over NovaRL's configuration; anything else is passed on as key=value.

python train.py --epochs 2 --steps_per_epoch 6 --batch_size 2 --max_new_tokens 10
"""

import argparse
import sys

from novarl.cli import main

parser = argparse.ArgumentParser(
    description="PPO on the sentiment task with the kit's flags (novarl rl has all the others)."
)
# The kit's defaults, but for the learning rate: its 1e-5 is for a pretrained GPT-2, ours is for the model in use.
for flag, default in {"epochs": 3, "steps_per_epoch": 8, "batch_size": 4, "max_new_tokens": 15, "seed": 42}.items():
    parser.add_argument(f"--{flag}", type=int, default=default)
parser.add_argument("--learning_rate", type=float, default=None)
parser.add_argument("--kl_coef", type=float, default=0.1)
parser.add_argument("--device", default="auto")

if __name__ == "__main__":
    flags, more = parser.parse_known_args()
    given = [f"{name}={value}" for name, value in vars(flags).items() if value is not None]
    sys.exit(main(["rl", "task=sentiment", "algo=ppo_clip", *given, *more]))
