"""A reward model in one file: from which of two texts is better to a number for each.

    loss = -mean log sigma(r_chosen - r_rejected) + centring (r_chosen + r_rejected)^2

the likelihood of the preferences if better means sigma(difference) of the time (Bradley and Terry; for language models
https://arxiv.org/abs/2203.02155). r is a linear map of the hidden state at the text's last token, its EOS.

Texts are by writers who repeat themselves more or less; which of two is better says a known rule, lexical richness. So
what the model has learned can be checked on topics it has not seen. `python recipes/reward_model.py` runs offline, in
about a minute on two CPU threads.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel as Model, PreTrainedTokenizerBase as Tokenizer

CHAT = "{{ bos_token }}{% for m in messages %}{{ m.content + ('\n' if m.role == 'user' else eos_token) }}{% endfor %}"
KINDS = "quiet old red deep cold small green bright"
THINGS = "river house forest market tower garden harbour road mill bridge"
WORDS = "stone tree bird fish lamp rain wind door boat hill moon bread wool glass fire salt"


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model-id", help="a causal LM or reward model, directory or hub name; default: a tiny model made here")
    add("--num-pairs", type=int, default=2560)
    add("--batch-size", type=int, default=64, help="pairs per update")
    add("--learning-rate", type=float, default=1e-3, help="1e-5 suits a model of a billion parameters")
    add("--num-epochs", type=int, default=2, help="passes over the pairs")
    add("--centring", type=float, default=0.01, help="holds the mean reward, which preferences leave open, near 0")
    add("--brevity-penalty-scale", type=float, default=0.5)
    add("--num-words", type=int, default=8, help="how many words the prompt asks for")
    add("--eval-pairs", type=int, default=512)
    add("--grad-clip", type=float, default=1.0)
    add("--output-dir", type=Path, default=Path(time.strftime("results/%Y%m%d-%H%M%S")))
    add("--save-every", type=int, help="epochs between saves; default: only at the end")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def topics(split: str, args: Namespace) -> list[str]:
    """Prompts on eighty topics, split once and for all: 60 to train on, 20 held out."""
    every = [f"Write ~{args.num_words} words: the {kind} {thing}" for kind in KINDS.split() for thing in THINGS.split()]
    random.Random(0).shuffle(every)
    return every[20:] if split == "train" else every[:20]


def reward(text: str, args: Namespace) -> float:
    """Distinct words over words, less a penalty for a text shorter than four fifths of what was asked for."""
    words = [word.lower() for word in re.findall(r"[A-Za-z]+(?:'[A-Za-z]+)?", text)]
    target = 0.8 * args.num_words
    brevity = max(0.0, (target - len(words)) / target)
    return len(set(words)) / max(len(words), 1) - args.brevity_penalty_scale * brevity


def write(args: Namespace, rng: random.Random) -> str:
    """Goes through the list of words from a random place on, and says some again: how many depends on the day."""
    words, again = WORDS.split(), rng.random()
    moves = (rng.random() >= again for _ in range(args.num_words + rng.randint(-5, 1)))
    return " ".join(words[place % len(words)] for place in itertools.accumulate(moves, initial=rng.randrange(99)))


def pairs(split: str, count: int, args: Namespace) -> list[tuple[str, str, str]]:
    """(prompt, chosen, rejected); ties are no preference and left out."""
    rng, prompts = random.Random(f"{args.seed} {split}"), topics(split, args)
    rows = [(rng.choice(prompts), write(args, rng), write(args, rng)) for _ in range(count)]
    better = [row if reward(row[1], args) > reward(row[2], args) else (row[0], row[2], row[1]) for row in rows]
    return [row for row in better if reward(row[1], args) != reward(row[2], args)]


def load(model_id: str | None) -> tuple[Model, Tokenizer]:
    """One output, in fp32 and without dropout. A language model gets a fresh head, a reward model keeps its own."""
    if model_id:
        how = {"num_labels": 1, "dtype": torch.float32}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model_id)
            model = transformers.AutoModelForSequenceClassification.from_pretrained(model_id, **how)
        except (OSError, ValueError) as error:
            ArgumentParser().exit(2, f"--model-id {model_id} cannot be loaded: {str(error).strip().splitlines()[0]}\n")
    else:
        tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # a token per byte: nothing to train or download
        size = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "initializer_range": 0.09}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_labels": 1}
        config = transformers.Qwen3Config(vocab_size=len(tokenizer), **size, **heads)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.chat_template = tokenizer.chat_template or CHAT
    return model.eval(), tokenizer


def encode(tokenizer: Tokenizer, prompts: list[str], replies: list[str]) -> tuple[Tensor, Tensor]:
    """(tokens, attention) [B, T], padded on the left. The EOS says that a text is over."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    texts = [text + reply + tokenizer.eos_token for text, reply in zip(texts, replies, strict=True)]
    batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"].bool()


def rewards(model: Model, tokens: Tensor, attention: Tensor) -> Tensor:
    """[B]: the head on the last column, which left padding makes everyone's last token.

    The model's own forward would look for the last token that is not padding, and miss the EOS where they are one."""
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)
    hidden = model.base_model(input_ids=tokens, attention_mask=attention.long(), position_ids=positions)[0]
    return model.score(hidden[:, -1]).squeeze(-1)


def preference_loss(chosen: Tensor, rejected: Tensor, centring: float) -> Tensor:
    return (centring * (chosen + rejected).square() - torch.nn.functional.logsigmoid(chosen - rejected)).mean()


def compare(model: Model, tokenizer: Tokenizer, batch: list[tuple[str, str, str]]) -> tuple[Tensor, Tensor]:
    """(r_chosen, r_rejected) [P]."""
    prompts, chosen, rejected = (list(column) for column in zip(*batch, strict=True))
    both = rewards(model, *encode(tokenizer, prompts + prompts, chosen + rejected))
    return both[: len(batch)], both[len(batch) :]


@torch.no_grad()
def evaluate(model: Model, tokenizer: Tokenizer, args: Namespace) -> float:
    """The share of pairs on held-out topics in which the chosen text gets strictly more; a tie counts as wrong."""
    rows = pairs("test", args.eval_pairs, args)
    chosen, rejected = compare(model, tokenizer, rows)
    print(f"  {rows[0][1]!r} {chosen[0]:.2f} > {rows[0][2]!r} {rejected[0]:.2f} ?")
    return (chosen > rejected).float().mean().item()


def main(argv: list[str] | None = None) -> tuple[float, float]:
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    model, tokenizer = load(args.model_id)
    before = evaluate(model, tokenizer, args)
    rng, rows = random.Random(args.seed), pairs("train", args.num_pairs, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    for epoch in range(1, args.num_epochs + 1):
        order = rng.sample(rows, len(rows))
        for start in range(0, len(order), args.batch_size):
            loss = preference_loss(*compare(model, tokenizer, order[start : start + args.batch_size]), args.centring)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
        if args.save_every and epoch % args.save_every == 0:
            model.save_pretrained(args.output_dir / f"epoch-{epoch}")
            tokenizer.save_pretrained(args.output_dir / f"epoch-{epoch}")
    after = evaluate(model, tokenizer, args)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"held-out accuracy: {before:.3f} before, {after:.3f} after; saved in {args.output_dir}")
    return before, after


if __name__ == "__main__":
    main()
