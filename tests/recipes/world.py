"""What the tests of the recipes share: the recipes as modules, a small model that has learnt something, and rollouts
recorded with it, as a recipe sees them (padded rows) and as the library does (a packed batch).
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from novarl.core.types import Batch, Prompt, Rollout, Scored, Sequence
from novarl.data.pack import pack

FOLDER = Path(__file__).parents[2] / "recipes"
NAMES = ("reinforce", "rloo", "grpo", "ppo", "vineppo", "dpo", "reward_model", "sft", "prime")
TEMPERATURE = 0.8
"""Not 1, so that a side that forgot it would be seen."""
PROMPTS = ("sort: cab", "sort: hgfed", "sort: ba", "sort: jaibhc", "sort: edc", "sort: fgaje")
"""Of different lengths, so that rows are padded on the left."""
SIBLINGS = 4


@cache
def recipe(name: str) -> ModuleType:
    """`recipes/<name>.py`, imported as a file: recipes are no package."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(name: str, **changes: Any) -> Namespace:
    """A recipe's defaults, with some of them changed."""
    values = vars(recipe(name).parse_args([]))
    assert changes.keys() <= values.keys()
    return Namespace(**(values | changes))


@cache
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return recipe("grpo").load(None)[1]


def untrained(dtype: torch.dtype = torch.float64, **changes: Any) -> transformers.PretrainedConfig:
    """In float64 GPT-2: its positions are learnt and absolute, so a row with shifted positions is another text, and it
    computes everything in the dtype of its weights. In float32 Qwen3, as in the recipes: GPT-2's key biases have no
    gradient but rounding errors, which Adam turns into whole steps."""
    if dtype == torch.float32:
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.15}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
        return transformers.Qwen3Config(vocab_size=len(tokenizer()), **(shape | heads | changes))
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.15}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2Config(vocab_size=len(tokenizer()), **(shape | dropout | changes))


@cache
def _trained(dtype: torch.dtype) -> nn.Module:
    """Knows three answers of different lengths to each of PROMPTS almost by heart."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(untrained(dtype)).eval()
    eos, pad = tokenizer().eos_token_id, tokenizer().pad_token_id
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    grpo, optimizer = recipe("grpo"), torch.optim.Adam(model.parameters(), lr=5e-3)
    lessons = [
        (prompt, answer) for prompt in PROMPTS for answer in (prompt[6:], "".join(sorted(prompt[6:])), prompt[7:9])
    ]
    tokens, attention = grpo.encode(tokenizer(), [row[0] for row in lessons], [row[1] for row in lessons])
    lengths = torch.tensor([[len(answer) + 1] for _, answer in lessons])
    mask = torch.arange(tokens.shape[1], 0, -1) <= lengths
    for _ in range(120):
        loss = -grpo.logprobs(model, tokens, attention, 1.0)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def trained(dtype: torch.dtype = torch.float64) -> Any:
    """A new copy of the model that has learnt its answers."""
    return deepcopy(_trained(dtype)).to(dtype)


@dataclass(frozen=True)
class Recorded:
    """Rollouts as rows [B, T] and as a packed batch of the same trajectories in the same order."""

    tokens: Tensor
    attention: Tensor
    mask: Tensor
    rewards: Tensor
    batch: Batch
    scored: list[Scored]

    def flat(self, rows: Tensor) -> Tensor:
        """A per-token tensor [B, T] in the columns of the packed batch [N]."""
        return rows.detach()[self.attention]


@cache
def recorded(seed: int, dtype: torch.dtype = torch.float64) -> Recorded:
    """SIBLINGS answers of the trained model to each prompt, some cut off by the limit; a reward that varies."""
    torch.manual_seed(seed)
    args = arguments("grpo", temperature=TEMPERATURE, max_new_tokens=6)
    model, grpo = trained(dtype), recipe("grpo")
    prompts = [prompt for prompt in PROMPTS for _ in range(SIBLINGS)]
    tokens, attention, mask, texts = grpo.generate(model, tokenizer(), *grpo.encode(tokenizer(), prompts), args)
    # A number that depends on the whole text, some of them equal: parity is about what is made of it.
    rewards = torch.tensor([len(set(text)) / 8 + (text[:1] == "a") for text in texts], dtype=dtype)
    with torch.no_grad():
        logp = grpo.logprobs(trained(dtype), tokens, attention, TEMPERATURE)
    scored = [
        scored_rollout(tokens[i], attention[i], mask[i], logp[i], group=i // SIBLINGS, reward=rewards[i].item())
        for i in range(len(prompts))
    ]
    return Recorded(tokens, attention, mask, rewards, pack(scored, dtype=dtype), scored)


def scored_rollout(
    tokens: Tensor, attention: Tensor, mask: Tensor, logp: Tensor, *, group: int, reward: float, role: str = "train"
) -> Scored:
    one = sequence(tokens, attention, mask, logp)
    asked = tuple(token for token, chosen in zip(one.tokens, one.mask, strict=True) if not chosen)
    prompt = Prompt(id=f"{group}", tokens=asked, messages=())
    rollout = Rollout(prompt, group, 0, (one,), (), "", role=role)  # type: ignore[arg-type]
    return Scored(rollout, {"reward": reward}, reward)


def sequence(tokens: Tensor, attention: Tensor, mask: Tensor, logp: Tensor) -> Sequence:
    """One padded row as the library knows it: without its padding."""
    chosen = mask[attention]
    return Sequence(
        tokens=tuple(tokens[attention].tolist()),
        mask=tuple(chosen.tolist()),
        behavior_logp=tuple((logp[attention] * chosen).tolist()),
        kept_logmass=(0.0,) * int(attention.sum()),
        versions=(0,) * int(attention.sum()),
    )


def distance(one: Seq[Tensor], other: Seq[Tensor]) -> float:
    """The largest difference between two lists of tensors."""
    return max((a.detach() - b.detach()).abs().max().item() for a, b in zip(one, other, strict=True))
