"""Supervised fine-tuning in one file: make the demonstrated answers likely, and nothing else.

    loss = -(1/M) sum over the M tokens of all answers in the batch of log pi(token | before)

The prompt is read but not imitated; the EOS that ends an answer is part of it, or the model would never learn to stop.
M is of the whole batch: a mean per micro-batch, averaged, would weigh tokens by the size of their micro-batch. It is
the policy gradient with an advantage of 1 for every demonstrated token.

The task is to sort five letters, shown by a teacher who is always right; held-out problems are other sets of letters.
`python recipes/sft.py` runs offline, in about a minute on two CPU threads.
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


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model-id", help="a directory or hub name; default: a tiny model made here")
    add("--batch-size", type=int, default=64)
    add("--micro-batch-size", type=int, default=64, help="answers per backward pass; changes nothing but the memory")
    add("--learning-rate", type=float, default=3e-3, help="1e-5 suits a model of a billion parameters")
    add("--num-epochs", type=int, default=100, help="passes over the training problems, letters shuffled anew")
    add("--grad-clip", type=float, default=1.0)
    add("--temperature", type=float, default=1.0)
    add("--max-new-tokens", type=int, default=8)
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


def pad_left(tokenizer: Tokenizer, rows: list[list[int]], replies: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, attention, mask) [B, T]; the mask is True on the last `replies[i]` tokens of row i.

    Both masks come from lengths: to look for the padding's id would lose the EOS wherever the two are one token."""
    width = max(map(len, rows))
    tokens = [[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows]
    from_right = torch.arange(width, 0, -1)
    attention = from_right <= torch.tensor([[len(row)] for row in rows])
    return torch.tensor(tokens), attention, from_right <= torch.tensor(replies)[:, None]


def render(tokenizer: Tokenizer, prompt: str) -> list[int]:
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def encode(tokenizer: Tokenizer, batch: list[tuple[str, str]]) -> tuple[Tensor, Tensor, Tensor]:
    """Prompt and answer are tokenized apart, so that they meet as they will when the model answers by itself."""
    prompts = [render(tokenizer, prompt) for prompt, _ in batch]
    replies = [[*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id] for _, reply in batch]
    rows = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    return pad_left(tokenizer, rows, [len(reply) for reply in replies])


def logprobs(model: Model, tokens: Tensor, attention: Tensor, temperature: float) -> Tensor:
    """log pi(token_t | before) [B, T] in the distribution that was sampled from; 0 for the first, unpredicted token."""
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)  # left padding must not move a token's position
    logits = model(input_ids=tokens, attention_mask=attention.long(), position_ids=positions).logits[:, :-1]
    logp = (logits / temperature).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(logp, (1, 0))


def sft_loss(logp: Tensor, mask: Tensor, count: int) -> Tensor:
    """Log-probabilities and mask [b, T] of a micro-batch; `count` is the number of masked tokens in the whole batch."""
    return -(logp * mask).sum() / count


@torch.no_grad()
def evaluate(model: Model, tokenizer: Tokenizer, args: Namespace) -> float:
    """The share of held-out problems whose sampled answer is exactly right."""
    rng = random.Random(1)
    batch = rng.choices(problems("test", rng), k=args.eval_size)
    prompt, attention, _ = pad_left(tokenizer, [render(tokenizer, row[0]) for row in batch], [0] * len(batch))
    how = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "max_new_tokens": args.max_new_tokens}
    tokens = model.generate(input_ids=prompt, attention_mask=attention.long(), **how)
    texts = tokenizer.batch_decode(tokens[:, prompt.shape[1] :], skip_special_tokens=True)
    print(f"  {batch[0][0]} -> {texts[0]}")
    return sum(text.strip() == answer for text, (_, answer) in zip(texts, batch, strict=True)) / len(batch)


def main(argv: list[str] | None = None) -> tuple[float, float]:
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    model, tokenizer = load(args.model_id)
    before = evaluate(model, tokenizer, args)
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for epoch in range(1, args.num_epochs + 1):
        # Falling to 0, for Adam's noise keeps a constant rate from settling.
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (epoch - 1) / args.num_epochs)
        rows = problems("train", rng)
        for start in range(0, len(rows), args.batch_size):
            tokens, attention, mask = encode(tokenizer, rows[start : start + args.batch_size])
            for part in torch.arange(len(tokens)).split(args.micro_batch_size):
                loss = sft_loss(logprobs(model, tokens[part], attention[part], 1.0), mask[part], int(mask.sum()))
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
        if epoch % 10 == 0 or epoch == args.num_epochs:
            print(f"epoch {epoch}: loss {loss.item():.3f} nats per token", flush=True)
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
