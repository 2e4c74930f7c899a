"""VinePPO in one file: PPO without a critic. What a state is worth is found out by going on from it, several times.

    V(s) = mean reward of K fresh continuations from s
    A_i  = r_i + V(s_{i+1}) - V(s_i)                              for step i of the answer, V = 0 past the end
    loss = mean_t -min(ratio_t A_t, clip(ratio_t, 1 - c, 1 + c) A_t),    each token with the advantage of its step

Steps begin and end between tokens, so nothing is tokenized again; equal states are estimated once; continuations are
never trained on. https://arxiv.org/abs/2410.01679

The task is to sort five letters, every token a step. A tiny model imitates a teacher who mostly copies them; the
verifier's 0 or 1 teaches it to sort. `python recipes/vineppo.py` runs offline, in about two minutes on two CPU threads.
"""

from __future__ import annotations

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
State = tuple[tuple[int, ...], tuple[int, ...], str]  # tokens of the prompt, of the reply so far, the right answer


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model-id", help="a directory or hub name; default: a tiny model made here")
    add("--batch-size", type=int, default=32, help="answers per batch")
    add("--continuations", type=int, default=4, help="K, for each state; the paper takes 9")
    add("--step-end", default="", help="a step ends with the token that completes this text; default: with every token")
    add("--learning-rate", type=float, default=5e-4, help="1e-6 suits a model of a billion parameters")
    add("--num-epochs", type=int, default=8, help="passes over the training problems")
    add("--updates-per-batch", type=int, default=4)
    add("--clip", type=float, default=0.2)
    add("--grad-clip", type=float, default=1.0)
    add("--temperature", type=float, default=1.0)
    add("--max-new-tokens", type=int, default=8)
    add("--warmup-steps", type=int, default=250, help="of imitation, for the tiny model")
    add("--eval-size", type=int, default=256)
    add("--output-dir", type=Path, default=Path(time.strftime("results/%Y%m%d-%H%M%S")))
    add("--save-every", type=int, help="epochs between saves; default: only at the end")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


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


def step_begins(tokenizer: Tokenizer, reply: list[int], step_end: str) -> list[int]:
    """Where the steps of a reply begin, as positions in its tokens; the first is 0."""
    begins = [0]
    for position in range(1, len(reply)):
        if step_end in tokenizer.decode(reply[begins[-1] : position]):
            begins.append(position)
    return begins


def state_values(model: Model, tokenizer: Tokenizer, states: list[State], args: Namespace) -> dict[State, float]:
    """The mean reward of K continuations of each state, equal ones once; none outlasts the answer it belongs to."""
    rows = [state for state in dict.fromkeys(states) for _ in range(args.continuations)]
    so_far = {"input_ids": [[*prompt, *reply] for prompt, reply, _ in rows]}
    batch = tokenizer.pad(so_far, padding_side="left", return_tensors="pt")
    tokens, _, mask, _ = generate(model, tokenizer, batch["input_ids"], batch["attention_mask"].bool(), args)
    values = dict.fromkeys(states, 0.0)
    for state, row, chosen in zip(rows, tokens, mask, strict=True):
        reply = [*state[1], *row[chosen].tolist()][: args.max_new_tokens]
        values[state] += reward(tokenizer.decode(reply, skip_special_tokens=True), state[2]) / args.continuations
    return values


def advantages(rewards: Tensor, values: list[list[float]], begins: list[list[int]], mask: Tensor) -> Tensor:
    """[B, T]: what each step added to the value of the state; behind the last one stands the reward."""
    result = torch.zeros(mask.shape, dtype=rewards.dtype)
    for row, (own, starts) in enumerate(zip(values, begins, strict=True)):
        columns = mask[row].nonzero().flatten()
        for start, value, following in zip(starts, own, [*own[1:], rewards[row].item()], strict=True):
            result[row, columns[start:]] = following - value  # later steps overwrite their own columns
    return result


def whiten(advantage: Tensor, mask: Tensor) -> Tensor:
    """Mean 0, deviation 1 over the whole batch; per answer it would erase which answers were good."""
    chosen = advantage[mask]
    return (advantage - chosen.mean()) / (chosen.std() + 1e-8) * mask


def ppo_loss(logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, clip: float) -> Tensor:
    ratio = (logp - old_logp).masked_fill(~mask, 0.0).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)[mask].mean()


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
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    for epoch in range(1, args.num_epochs + 1):
        rows = problems("train", rng)
        for start in range(0, len(rows), args.batch_size):
            batch = rows[start : start + args.batch_size]
            prompts = encode(tokenizer, [prompt for prompt, _ in batch])
            tokens, attention, mask, texts = generate(model, tokenizer, *prompts, args)
            rewards = torch.tensor([reward(text, answer) for text, (_, answer) in zip(texts, batch, strict=True)])
            states, begins = [], []
            for i, (_, answer) in enumerate(batch):
                prompt, reply = tokens[i][attention[i] & ~mask[i]].tolist(), tokens[i][mask[i]].tolist()
                begins.append(step_begins(tokenizer, reply, args.step_end))
                states.append([(tuple(prompt), tuple(reply[:begin]), answer) for begin in begins[i]])
            found = state_values(model, tokenizer, list(itertools.chain.from_iterable(states)), args)
            values = [[found[state] for state in own] for own in states]
            advantage = whiten(advantages(rewards, values, begins, mask), mask)
            with torch.no_grad():
                old_logp = logprobs(model, tokens, attention, args.temperature)
            for _ in range(args.updates_per_batch):
                logp = logprobs(model, tokens, attention, args.temperature)
                update(model, optimizer, ppo_loss(logp, old_logp, advantage, mask, args.clip), args.grad_clip)
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
