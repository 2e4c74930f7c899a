"""A request's tokens and log-probabilities are the same bits alone, among 64, and while others come and go."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from novarl.core.types import Completion, Sampling
from novarl.engines.local import runner
from novarl.engines.local.engine import LocalEngine, sample_all
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import head
from novarl.models.load import Policy, load, save
from novarl.models.transformer import Decoder, DecoderConfig

from .conftest import echo

Wanted = list[tuple[list[int], Sampling, str]]


def requests(n: int) -> Wanted:
    """Prompts of 5 to 60 letters, a few of 180 to 420, some twice; completions of 1 to 30 tokens."""
    rng = random.Random(0)
    wanted: Wanted = []
    for index in range(n):
        length = rng.randint(180, 420) if index % 16 == 0 else rng.randint(5, 60)
        prompt = list(wanted[-1][0]) if index % 8 == 7 else echo(length, rng=rng)
        wanted.append((prompt, Sampling(max_tokens=rng.randint(1, 30), seed=index % 3), f"request {index}"))
    return wanted


def differences(directory: str) -> dict[str, object]:
    """How many of 64 requests differ, in a token or in any bit of a log-probability, from the same in other company."""
    torch.set_num_threads(2)
    policy = load(directory)
    wanted = requests(64)

    def sample(wanted: Wanted, max_batch: int) -> list[Completion]:
        engine = LocalEngine(policy.model, policy.tokenizer, eos_ids=[ord("q")], context=512, max_batch=max_batch)
        return sample_all(engine, wanted)

    together = sample(wanted, 64)
    others = {
        "again": sample(wanted, 64),
        "alone": [sample([request], 64)[0] for request in wanted],
        "7 at a time": sample(wanted, 7),
        "16 at a time, backwards": sample(wanted[::-1], 16)[::-1],
    }
    counts = {name: sum(a != b for a, b in zip(together, other, strict=True)) for name, other in others.items()}
    return {"lengths": sorted(len(completion.tokens) for completion in together), **counts}


def test_bits_do_not_depend_on_the_company(policy: Policy, tmp_path: Path, reproducible: None) -> None:
    # Two threads, since on one some rows agree by themselves that on two do not; in a process of its own, whose threads
    # wait asleep: spinning ones take minutes where cores are shared.
    save(policy, tmp_path)
    root = Path(__file__).parents[2]
    program = (
        "import json, sys; from tests.engines.test_bits import differences; print(json.dumps(differences(sys.argv[1])))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    process = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    lengths = result.pop("lengths")
    assert len(set(lengths)) > 15, "rows must end at many different times, or nothing is compacted"
    assert result == dict.fromkeys(("again", "alone", "7 at a time", "16 at a time, backwards"), 0)


def test_a_large_vocabulary_is_multiplied_by_blocks_to_the_same_bits(reproducible: None) -> None:
    """Whatever the number of rows, and close to one product; the last block is a short one."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = 2 * runner.BLOCK + 70
    weight, hidden = (torch.randn(count, 96, generator=generator) for count in (vocabulary, 40))
    every = runner._blockwise(hidden, weight)
    torch.testing.assert_close(every, hidden @ weight.T, rtol=1e-5, atol=1e-4)
    for rows in (slice(0, 1), slice(3, 8), slice(5, 21), slice(0, 36)):
        assert torch.equal(runner._blockwise(hidden[rows], weight), every[rows])


@torch.no_grad()
def test_logits_of_a_large_vocabulary_do_not_depend_on_the_company(reproducible: None) -> None:
    """By whichever way this processor is fastest."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1}
    sizes = {"vocab_size": 2 * runner.BLOCK + 70, "hidden_size": 96, "intermediate_size": 64}
    model = Decoder(DecoderConfig(**sizes, **shape, initializer_range=0.3)).eval()
    runs, hidden = runner.ModelRunner(model), torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    every = runs._logits(hidden)
    torch.testing.assert_close(every, hidden @ head(model)[0].T, rtol=1e-5, atol=1e-4)
    for rows in (slice(0, 4), slice(8, 20), slice(20, 60), slice(0, 16)):
        assert torch.equal(runs._logits(hidden[rows]), every[rows])


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(1, 1, 6), (1, 1, 32), (3, 3, 20), (10, 5, 12), (9, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_few_or_small_heads_do_not_depend_on_the_company(
    heads: int, key_heads: int, size: int, dtype: torch.dtype, reproducible: None
) -> None:
    """PyTorch multiplies small matrices by a loop of its own, larger ones by MKL, and a batch of one as no batch."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": size, "num_hidden_layers": 2}
    config = DecoderConfig(vocab_size=272, hidden_size=36, intermediate_size=60, initializer_range=0.3, **shape)
    model = Decoder(config).eval()
    wanted = requests(32)

    def sample(wanted: Wanted) -> list[Completion]:
        engine = LocalEngine(model, ByteTokenizer(), eos_ids=[0], context=512, compute_dtype=dtype)
        return sample_all(engine, wanted)

    together = sample(wanted)
    assert [sample([request])[0] == one for request, one in zip(wanted, together, strict=True)] == [True] * 32
