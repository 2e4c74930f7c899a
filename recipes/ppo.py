"""PPO in one file: a critic says token by token what reward is still to come, and the clip keeps each move small.

    r_t  = -beta log(pi_old / pi_ref), and the verifier's score on the last token
    A_t  = sum_{l >= 0} (gamma lam)^l delta_{t+l}        delta_t = r_t + gamma V_{t+1} - V_t, V = 0 past the end   (GAE)
    loss = mean_t -min(ratio_t A_t, clip(ratio_t, 1 - c, 1 + c) A_t)     critic: mean_t (V_t - (A_t + V_t,old))^2 / 2

https://arxiv.org/abs/1707.06347 (PPO), 1506.02438 (GAE), 2203.02155 (KL to a frozen copy, in the reward).

The task is to sort five letters. A tiny model imitates a teacher who mostly copies them; the verifier's 0 or 1 then
teaches it to sort. `python recipes/ppo.py` runs offline, in about a minute on two CPU threads.
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
    add("--batch-size", type=int, default=64, help="answers per batch")
    add("--learning-rate", type=float, default=5e-4, help="1e-6 suits a model of a billion parameters")
    add("--critic-learning-rate", type=float, default=1e-3)
    add("--num-epochs", type=int, default=20, help="passes over the training problems")
    add("--updates-per-batch", type=int, default=4)
    add("--clip", type=float, default=0.2)
    add("--gamma", type=float, default=1.0)
    add("--lam", type=float, default=0.95)
    add("--kl-coef", type=float, default=0.01)
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


class Critic(torch.nn.Module):
    """A copy of the policy's trunk, read through one linear map that starts at zero."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(model.base_model)
        self.head = torch.nn.Linear(model.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, attention: Tensor) -> Tensor:
        """V [B, T]: column t is the value of the state in which tokens[:, t] was chosen, so it has not seen it."""
        positions = (attention.long().cumsum(1) - 1).clamp(min=0)
        hidden = self.trunk(input_ids=tokens, attention_mask=attention.long(), position_ids=positions)[0]
        return torch.nn.functional.pad(self.head(hidden[:, :-1]).squeeze(-1), (1, 0))


def token_rewards(scores: Tensor, old_logp: Tensor, ref_logp: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """The KL penalty on every token [B, T], the score [B] on the last."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return -kl_coef * (old_logp - ref_logp) * mask + scores[:, None] * last


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [B, T], 0 outside the mask; an answer cut off by the limit is over like any other."""
    values, advantages = values * mask, torch.zeros_like(rewards)
    advantage = after = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * after - values[:, t]
        advantages[:, t] = advantage = (delta + gamma * lam * advantage) * mask[:, t]
        after = values[:, t]
    return advantages, advantages + values


def whiten(advantage: Tensor, mask: Tensor) -> Tensor:
    """Mean 0, deviation 1 over the whole batch; per answer it would erase which answers were good."""
    chosen = advantage[mask]
    return (advantage - chosen.mean()) / (chosen.std() + 1e-8) * mask


def ppo_loss(logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, clip: float) -> Tensor:
    ratio = (logp - old_logp).masked_fill(~mask, 0.0).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)[mask].mean()


def value_loss(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    return 0.5 * (values - returns)[mask].square().mean()


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
    rng, reference, critic = random.Random(args.seed), copy.deepcopy(model), Critic(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_learning_rate, weight_decay=0.0)
    for epoch in range(1, args.num_epochs + 1):
        rows = problems("train", rng)
        for start in range(0, len(rows), args.batch_size):
            batch = rows[start : start + args.batch_size]
            prompts = encode(tokenizer, [prompt for prompt, _ in batch])
            tokens, attention, mask, texts = generate(model, tokenizer, *prompts, args)
            rewards = torch.tensor([reward(text, answer) for text, (_, answer) in zip(texts, batch, strict=True)])
            with torch.no_grad():
                old_logp = logprobs(model, tokens, attention, args.temperature)
                ref_logp = logprobs(reference, tokens, attention, args.temperature)
                per_token = token_rewards(rewards, old_logp, ref_logp, mask, args.kl_coef)
                advantage, returns = gae(per_token, critic(tokens, attention), mask, args.gamma, args.lam)
            advantage = whiten(advantage, mask)
            for _ in range(args.updates_per_batch):
                logp = logprobs(model, tokens, attention, args.temperature)
                update(model, optimizer, ppo_loss(logp, old_logp, advantage, mask, args.clip), args.grad_clip)
                loss = value_loss(critic(tokens, attention), returns, mask)
                update(critic, critic_optimizer, loss, args.grad_clip)
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
