"""REINFORCE in one file: raise a text's probability in proportion to reward minus baseline.

    loss = -mean_i (R_i - b) sum_t log pi(y_t)                          https://doi.org/10.1007/BF00992696

    b = none   0
        mean   the batch's mean reward. It holds the text's own, which scales the gradient by 1 - 1/B, direction kept
        ema    a moving average of the *earlier* batches' rewards, updated after use for the same reason
        scst   the reward of the model's greedy text on the same topic (https://arxiv.org/abs/1612.00563)

The task is NanoRL's: write without repeating words. A tiny model imitates a teacher who repeats himself, and the reward
teaches it not to. `python recipes/reinforce.py --baseline ema` runs offline, in about a minute on two CPU threads.
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
Sampled = tuple[Tensor, Tensor, Tensor, list[str]]
KINDS = "quiet old red deep cold small green bright"
THINGS = "river house forest market tower garden harbour road mill bridge"
WORDS = "stone tree bird fish lamp rain wind door boat hill moon bread wool glass fire salt"


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model-id", help="a directory or hub name; default: a tiny model made here")
    add("--batch-size", type=int, default=8)
    add("--learning-rate", type=float, default=2e-4, help="1e-5 suits a model of a billion parameters")
    add("--num-epochs", type=int, default=25, help="passes over the training topics")
    add("--baseline", choices=["none", "mean", "ema", "scst"], default="none")
    add("--ema-beta", type=float, default=0.9, help="how slowly the ema baseline forgets")
    add("--brevity-penalty-scale", type=float, default=0.5, help="at 0, one-word texts score highest")
    add("--grad-clip", type=float, default=1.0)
    add("--temperature", type=float, default=1.0)
    add("--num-words", type=int, default=8, help="how many words the prompt asks for; NanoRL asks for 100")
    add("--max-new-tokens", type=int, default=56)
    add("--warmup-steps", type=int, default=150, help="of imitation, for the tiny model")
    add("--eval-samples", type=int, default=8, help="texts per held-out topic")
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


def load(model_id: str | None) -> tuple[Model, Tokenizer]:
    """In fp32: 16-bit weights would round small updates to nothing. Without dropout: it would make two policies."""
    if model_id:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model_id)
            model = transformers.AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32)
        except (OSError, ValueError) as error:
            ArgumentParser().exit(2, f"--model-id {model_id} cannot be loaded: {str(error).strip().splitlines()[0]}\n")
    else:
        tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # a token per byte: nothing to train or download
        size = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "initializer_range": 0.09}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=len(tokenizer), **size, **heads))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template or CHAT
    # A hub model's own top-k, top-p or repetition penalty would sample from another distribution than is trained.
    stop = model.generation_config.eos_token_id or tokenizer.eos_token_id
    model.generation_config = transformers.GenerationConfig(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id)
    return model.eval(), tokenizer


def encode(tokenizer: Tokenizer, prompts: list[str], replies: list[str] | None = None) -> tuple[Tensor, Tensor]:
    """(tokens, attention) [B, T], padded on the left. A reply is followed by EOS, or no text would ever end."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    if replies is not None:
        texts = [text + reply + tokenizer.eos_token for text, reply in zip(texts, replies, strict=True)]
    batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"].bool()


@torch.no_grad()
def generate(
    model: Model, tokenizer: Tokenizer, prompt: Tensor, attention: Tensor, args: Namespace, *, greedy: bool = False
) -> Sampled:
    """Sample replies: (tokens, attention, mask) [B, T] and texts; the mask is True on what the policy chose.

    Both masks come from lengths: to look for the padding's id would lose the EOS wherever the two are one token."""
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": args.temperature, "top_k": 0}
    asked = {"input_ids": prompt, "attention_mask": attention.long(), "max_new_tokens": args.max_new_tokens}
    tokens = model.generate(**asked, **how)
    reply = tokens[:, prompt.shape[1] :]
    stop = torch.isin(reply, torch.tensor(model.generation_config.eos_token_id)).long()
    chosen = stop.cumsum(1) - stop == 0  # up to and with the first EOS; behind it is padding
    texts = [tokenizer.decode(row[keep], skip_special_tokens=True) for row, keep in zip(reply, chosen, strict=True)]
    return tokens, torch.cat([attention, chosen], 1), torch.cat([torch.zeros_like(attention), chosen], 1), texts


def logprobs(model: Model, tokens: Tensor, attention: Tensor, temperature: float) -> Tensor:
    """log pi(token_t | before) [B, T] in the distribution that was sampled from; 0 for the first, unpredicted token."""
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)  # left padding must not move a token's position
    logits = model(input_ids=tokens, attention_mask=attention.long(), position_ids=positions).logits[:, :-1]
    logp = (logits / temperature).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(logp, (1, 0))


def advantages(rewards: Tensor, greedy: Tensor | None, ema: float | None, args: Namespace) -> tuple[Tensor, float]:
    """(R - b [B], the moving average after this batch). The first batch has no average yet, so no ema baseline."""
    mean = rewards.mean().item()
    after = mean if ema is None else args.ema_beta * ema + (1 - args.ema_beta) * mean
    baseline = {"none": 0.0, "mean": mean, "ema": ema or 0.0, "scst": greedy}[args.baseline]
    return rewards - baseline, after


def reinforce_loss(logp: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """The sum over a text's tokens [B, T], the mean over texts: the gradient of expected reward, nothing rescaled."""
    return -(advantage * (logp * mask).sum(1)).mean()


def update(model: Model, optimizer: torch.optim.Optimizer, loss: Tensor, grad_clip: float) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()


def teach(args: Namespace, rng: random.Random) -> str:
    """The teacher goes through the list of words from a random place on, but says 60 % of them again."""
    words, moves = WORDS.split(), (rng.random() < 0.4 for _ in range(args.num_words + rng.randint(-3, 1)))
    return " ".join(words[place % len(words)] for place in itertools.accumulate(moves, initial=rng.randrange(99)))


def warm_up(model: Model, tokenizer: Tokenizer, args: Namespace) -> None:
    """Imitate the teacher, repetitions and all: reinforcement learning can only favor what is sampled already."""
    rng, optimizer = random.Random(args.seed), torch.optim.AdamW(model.parameters())
    for step in range(args.warmup_steps):
        prompts = rng.sample(topics("train", args), 32)
        tokens, attention = encode(tokenizer, prompts, [teach(args, rng) for _ in prompts])
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / args.warmup_steps)
        update(model, optimizer, -logprobs(model, tokens, attention, 1.0)[attention].mean(), args.grad_clip)


def evaluate(model: Model, tokenizer: Tokenizer, args: Namespace) -> float:
    """Mean reward of sampled texts on held-out topics."""
    prompts = [prompt for prompt in topics("test", args) for _ in range(args.eval_samples)]
    *_, texts = generate(model, tokenizer, *encode(tokenizer, prompts), args)
    print(f"  {prompts[0]} -> {texts[0]}")
    return sum(reward(text, args) for text in texts) / len(texts)


def main(argv: list[str] | None = None) -> tuple[float, float]:
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    model, tokenizer = load(args.model_id)
    if not args.model_id:
        warm_up(model, tokenizer, args)
    before = evaluate(model, tokenizer, args)
    rng, ema, greedy = random.Random(args.seed), None, None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    for epoch in range(1, args.num_epochs + 1):
        order = rng.sample(topics("train", args), len(topics("train", args)))
        for start in range(0, len(order), args.batch_size):
            batch = order[start : start + args.batch_size]
            prompts = encode(tokenizer, batch)
            tokens, attention, mask, texts = generate(model, tokenizer, *prompts, args)
            rewards = torch.tensor([reward(text, args) for text in texts])
            if args.baseline == "scst":
                *_, texts = generate(model, tokenizer, *prompts, args, greedy=True)
                greedy = torch.tensor([reward(text, args) for text in texts])
            advantage, ema = advantages(rewards, greedy, ema, args)
            logp = logprobs(model, tokens, attention, args.temperature)
            update(model, optimizer, reinforce_loss(logp, advantage, mask), args.grad_clip)
        print(f"epoch {epoch}: reward {rewards.mean():.3f}", flush=True)
        if args.save_every and epoch % args.save_every == 0:
            model.save_pretrained(args.output_dir / f"epoch-{epoch}")
            tokenizer.save_pretrained(args.output_dir / f"epoch-{epoch}")
    after = evaluate(model, tokenizer, args)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"held-out reward: {before:.3f} before, {after:.3f} after; saved in {args.output_dir}")
    return before, after


if __name__ == "__main__":
    main()
