"""A model of your own: a plain `nn.Module` learns a built-in task, first by imitation, then by reward.

    python examples/own_model.py

All that NovaRL needs is `forward(tokens, position_ids) -> logits`: tokens and positions are int64 [batch, time], logits
are [batch, time, vocabulary]. Logits at position t may depend on tokens 0 to t only; a module that looks ahead is
refused. There is no cache, so sampling runs the whole sequence for every token: this suits small models and short
answers. Without `tokenizer=`, tokens are bytes and a few special ones, 262 in all.
"""

import argparse

from torch import Tensor, nn

import novarl


class Recurrent(nn.Module):
    """A language model without attention: one recurrent layer."""

    context = 128  # the longest sequence it is given, in tokens

    def __init__(self, vocabulary: int = 262, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embed(tokens))
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--run-dir", default="runs/own-model")
    args = parser.parse_args()
    trainer = novarl.RL(model=Recurrent(), prompts="bandit", warmup=150, steps=args.steps, run_dir=args.run_dir)
    summary = trainer.run()
    print(f"held-out reward: {summary['before']['score']:.2f} before, {summary['after']['score']:.2f} after")


if __name__ == "__main__":
    main()
