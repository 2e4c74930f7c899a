"""GRPO in one file: a group of answers to each prompt, each judged by how far it beats its siblings.

    A_i  = (R_i - mean R) / std R                              over the k answers to one prompt
    loss = mean_i 1/|y_i| sum_t [ -min(r_t A_i, clip(r_t, 1 - c, 1 + c) A_i) + beta KL_t ]
    r_t  = pi(y_t) / pi_old(y_t)            KL_t = pi_ref/pi - 1 - log(pi_ref/pi), never negative

The siblings are the baseline, so there is no critic. https://arxiv.org/abs/2402.03300

The task is to sort five letters. A tiny model imitates a teacher who mostly copies them; the verifier's 0 or 1 then
teaches it to sort. `python recipes/grpo.py` runs offline, in about a minute on two CPU threads.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel as Model, PreTrainedTokenizerBase as Tokenizer

CHAT = "{{ bos_token }}{% for m in messages %}{{ m.content + ('\n' if m.role == 'user' else eos_token) }}{% endfor %}"
Sampled = tuple[Tensor, Tensor, Tensor, list[str]]


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model-id", help="a directory or hub name; default: a tiny model made here")
    add("--batch-size", type=int, default=8, help="prompts per batch")
    add("--group-size", type=int, default=8, help="answers per prompt")
    add("--learning-rate", type=float, default=5e-4, help="1e-6 suits a model of a billion parameters")
    add("--num-epochs", type=int, default=6, help="passes over the training problems")
    add("--updates-per-batch", type=int, default=2, help="from the second on the clip has work to do")
    add("--clip", type=float, default=0.2)
    add("--kl-coef", type=float, default=0.04)
    add("--grad-clip", type=float, default=1.0)
    add("--temperature", type=float, default=1.0)
    add("--max-new-tokens", type=int, default=8)
    add("--warmup-steps", type=int, default=250, help="of imitation, for the tiny model")
    add("--eval-size", type=int, default=256)
    add("--output-dir", type=Path, default=Path(time.strftime("results/%Y%m%d-%H%M%S")))
    add("--save-every", type=int, help="epochs between saves; default: only at the end")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.group_size < 2:
        parser.error("--group-size must be at least 2: an answer is compared with its siblings")
    return args


def problems(split: str, rng: random.Random) -> list[tuple[str, str]]:
    """(prompt, answer) for every set of five of ten letters, in random order: 176 to train on, 76 others held out."""
    sets = ["".join(letters) for letters in itertools.combinations("abcdefghij", 5)]
    random.Random(0).shuffle(sets)
    answers = sets[76:] if split == "train" else sets[:76]
    return [("sort: " + "".join(rng.sample(answer, 5)), answer) for answer in rng.sample(answers, len(answers))]


def reward(text: str, answer: str) -> float:
    return float(text.strip() == answer)


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
def generate(model: Model, tokenizer: Tokenizer, prompt: Tensor, attention: Tensor, args: Namespace) -> Sampled:
    """Sample replies: (tokens, attention, mask) [B, T] and texts; the mask is True on what the policy chose.

    Both masks come from lengths: to look for the padding's id would lose the EOS wherever the two are one token."""
    how = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "max_new_tokens": args.max_new_tokens}
    tokens = model.generate(input_ids=prompt, attention_mask=attention.long(), **how)
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


def advantages(rewards: Tensor, group_size: int) -> Tensor:
    """[B] -> [B], siblings side by side. A group of equal rewards says nothing and gets 0."""
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def grpo_loss(logp: Tensor, old: Tensor, ref: Tensor, advantage: Tensor, mask: Tensor, args: Namespace) -> Tensor:
    """Log-probabilities and mask [B, T], advantage [B]. Each answer counts the same, whatever its length."""
    ratio = (logp - old).masked_fill(~mask, 0.0).exp()
    clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
    gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    gap = (ref - logp).masked_fill(~mask, 0.0)
    kl = torch.expm1(gap) - gap
    return (((args.kl_coef * kl - gain) * mask).sum(1) / mask.sum(1)).mean()


def update(model: Model, optimizer: torch.optim.Optimizer, loss: Tensor, grad_clip: float) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()


def warm_up(model: Model, tokenizer: Tokenizer, args: Namespace) -> None:
    """Imitate a teacher who copies the letters as they stand, but sorts one time in four: rewards need that one."""
    rng, optimizer = random.Random(args.seed), torch.optim.AdamW(model.parameters())
    for step in range(args.warmup_steps):
        batch = rng.choices(problems("train", rng), k=64)
        replies = [answer if rng.random() < 0.25 else prompt[6:] for prompt, answer in batch]
        tokens, attention = encode(tokenizer, [prompt for prompt, _ in batch], replies)
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / args.warmup_steps)
        update(model, optimizer, -logprobs(model, tokens, attention, 1.0)[attention].mean(), args.grad_clip)


def evaluate(model: Model, tokenizer: Tokenizer, args: Namespace) -> float:
    """Mean reward of sampled answers to held-out problems, always the same ones."""
    rng = random.Random(1)
    batch = rng.choices(problems("test", rng), k=args.eval_size)
    *_, texts = generate(model, tokenizer, *encode(tokenizer, [prompt for prompt, _ in batch]), args)
    print(f"  {batch[0][0]} -> {texts[0]}")
    return sum(reward(text, answer) for text, (_, answer) in zip(texts, batch, strict=True)) / len(batch)


def main(argv: list[str] | None = None) -> tuple[float, float]:
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    model, tokenizer = load(args.model_id)
    if not args.model_id:
        warm_up(model, tokenizer, args)
    before = evaluate(model, tokenizer, args)
    rng, reference = random.Random(args.seed), copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    for epoch in range(1, args.num_epochs + 1):
        rows = problems("train", rng)
        for start in range(0, len(rows), args.batch_size):
            batch = [row for row in rows[start : start + args.batch_size] for _ in range(args.group_size)]
            prompts = encode(tokenizer, [prompt for prompt, _ in batch])
            tokens, attention, mask, texts = generate(model, tokenizer, *prompts, args)
            rewards = torch.tensor([reward(text, answer) for text, (_, answer) in zip(texts, batch, strict=True)])
            advantage = advantages(rewards, args.group_size)
            with torch.no_grad():
                old = logprobs(model, tokens, attention, args.temperature)
                ref = logprobs(reference, tokens, attention, args.temperature)
            for _ in range(args.updates_per_batch):
                logp = logprobs(model, tokens, attention, args.temperature)
                update(model, optimizer, grpo_loss(logp, old, ref, advantage, mask, args), args.grad_clip)
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
