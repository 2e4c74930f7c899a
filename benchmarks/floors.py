"""What the machine can do, and the least time a workload could take on it: `python -m benchmarks.floors cpu`.

FLOPs, a multiplication and an addition counting as two; N are the weights in the layers' matrices, M those of the last
layer that follow its attention, V D those of the head, L the layers, A the width of all query heads together, T the
tokens that pass through the layers, H those that need the head, and `pairs` the (query, key) pairs of causal attention:

    forward   2 ((N - M) T + (M + V D) H) + 4 L A pairs
    training  3 times that

A prompt is counted once for each group of answers, in sampling and in training, which both allow. The floor is training
and prompts at the rate of large products, and decoding at the rate of products with as many rows as answers are sampled
together, or the time to read the weights once a token where that is longer. A command cannot be faster than what it
has to import: its floor is a Python that imports torch, without collecting garbage meanwhile, and ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.sides import Run, our_python

REPEATS = 7
LASTING = 5.0
"""Seconds, about those of a large update, for which products go on end."""
ROWS, DECODE_ROWS, WIDTH, INNER = 4096, 64, 512, 2048
WIDER = 8
"""So many times wider are the products of a GPU, which smaller ones do not fill."""

PEAKS = {"H100 PCIe": 756.0, "H100": 989.4, "H200": 989.4, "A100": 312.0, "L40S": 362.0, "L4": 121.0}
"""TFLOP/s of dense bf16 products that the maker states of a GPU, by words of its name."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured: GFLOP/s of products in the shapes of training and of decoding, GB/s from memory, and the seconds in
    which Python imports torch, and torch with transformers' Llama and tokenizer.

    `peak_bf16` is what a GPU's maker states of it (PEAKS), where that is known; elsewhere what was measured.
    `train_fp32` is the best of a few products; `lasting_fp32` the mean of the same in LASTING seconds on end, which is
    what a machine that swings gives to whoever computes for longer. 0: not measured, by earlier code.
    They are those of a moment, and machines swing: a round's are the better of what was found before and after it.
    """

    train_fp32: float
    decode_fp32: float
    train_bf16: float
    decode_bf16: float
    bandwidth: float
    torch: float
    transformers: float
    peak_bf16: float = 0.0
    lasting_fp32: float = 0.0

    def better(self, other: Rates) -> Rates:
        """The faster of the two in each."""
        pairs = {name: (value, asdict(other)[name]) for name, value in asdict(self).items()}
        return Rates(**{name: (min if name in SECONDS else max)(pair) for name, pair in pairs.items()})


SECONDS = ("torch", "transformers")
"""Of the rates those that are times: the less, the faster."""

Floor = Callable[[Path, Mapping[str, Run], Rates], dict[str, float]]
"""The least seconds of a side, in all or of its parts, given the runs of a round."""


@dataclass(frozen=True, slots=True)
class Size:
    """A decoder's matrices, from its `config.json`."""

    layers: int
    stack: int
    last: int
    head: int
    attention: int

    @classmethod
    def of(cls, folder: Path) -> Size:
        shape: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
        hidden, size = shape["hidden_size"], shape["head_dim"]
        query, key = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
        last = hidden * query + 3 * hidden * shape["intermediate_size"]
        layer = hidden * (query + 2 * key) + last
        layers = shape["num_hidden_layers"]
        return cls(layers, layers * layer, last, shape["vocab_size"] * hidden, query)

    def forward(self, tokens: float, headed: float, pairs: float) -> float:
        """FLOPs of a forward pass."""
        return (
            2 * ((self.stack - self.last) * tokens + (self.last + self.head) * headed)
            + 4 * self.layers * self.attention * pairs
        )


def grouped(size: Size, prompt: int, groups: int, answers: Sequence[float]) -> tuple[float, float, float]:
    """FLOPs of (prompts, decoding, training) of a step whose `answers` belong to `groups` prompts of one length."""
    total = sum(answers)
    after = sum(answer * prompt + _causal(answer) for answer in answers)
    prompts = size.forward(groups * prompt, groups, groups * _causal(prompt))
    decoding = size.forward(total, total, after)
    learnt = size.forward(groups * prompt + total, total, groups * _causal(prompt) + after)
    return prompts, decoding, 3 * learnt


def floor_seconds(size: Size, rates: Rates, prompt: int, groups: int, answers: Sequence[float]) -> dict[str, float]:
    """The least seconds of a step, and of its parts, in fp32."""
    prompts, decoding, learnt = grouped(size, prompt, groups, answers)
    reading = max(answers) * 4 * (size.stack + size.head) / rates.bandwidth / 1e9
    generation = prompts / rates.train_fp32 / 1e9 + max(decoding / rates.decode_fp32 / 1e9, reading)
    learn = learnt / rates.train_fp32 / 1e9
    return {"seconds": generation + learn, "generation": generation, "learn": learn}


def measure(device: str) -> Rates:
    """The best of REPEATS products each, of float32 by the fastest library and weights' layout; imports once."""
    import torch

    from novarl.kernels import products
    from novarl.kernels.products import is_fast

    torch.set_default_device(device)
    wider = 1 if device == "cpu" else WIDER
    width, inner = WIDTH * wider, INNER * wider

    def wait() -> None:
        if device != "cpu":
            torch.accelerator.synchronize()

    def product(rows: int, dtype: torch.dtype) -> tuple[float, float, Callable[[], object]]:
        """GFLOP, the seconds they take the fastest of the ways at its best, and that way."""
        left, right = torch.randn(rows, width).to(dtype), torch.randn(inner, width).to(dtype).t()
        out, times = torch.empty(rows, inner, dtype=dtype), max(1, ROWS // rows)  # fresh memory would cost page faults

        def multiply(weight: torch.Tensor) -> None:
            for _ in range(times):
                products.times(left, weight)

        ways: list[Callable[[], object]] = [lambda: [torch.mm(left, right, out=out) for _ in range(times)]]
        if is_fast(left, right):
            ways += [partial(multiply, weight) for weight in (right.t(), products.pack(right.t()))]
        seconds = [_best(way, wait) for way in ways]
        best = min(seconds)
        return 2 * rows * width * inner * times / 1e9, best, ways[seconds.index(best)]

    def rate(rows: int, dtype: torch.dtype) -> float:
        work, best, _ = product(rows, dtype)
        return work / best

    block = torch.ones(64 * 2**20)  # 256 MB: no cache holds it
    read = _best(block.sum, wait)
    train_bf16 = rate(ROWS, torch.bfloat16)
    work, best, fastest = product(ROWS, torch.float32)
    return Rates(
        train_fp32=work / best,
        lasting_fp32=work / _lasting(fastest, wait),
        decode_fp32=rate(DECODE_ROWS, torch.float32),
        train_bf16=train_bf16,
        decode_bf16=rate(DECODE_ROWS, torch.bfloat16),
        bandwidth=block.numel() * 4 / read / 1e9,
        torch=_imported("import torch"),
        transformers=_imported("import torch; from transformers import LlamaForCausalLM, PreTrainedTokenizerFast"),
        peak_bf16=stated_peak(name_of(device)) or train_bf16,
    )


def name_of(device: str) -> str:
    """What a GPU calls itself; "cpu" of a CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def stated_peak(name: str) -> float | None:
    """GFLOP/s of dense bf16 that the maker states of the GPU of that name; None of an unknown one."""
    words = set(name.replace("-", " ").split())
    return next((1000 * peak for known, peak in PEAKS.items() if words >= set(known.split())), None)


def _imported(what: str) -> float:
    """In a process of its own."""
    command = [our_python(), "-c", f"import gc; gc.disable(); {what}"]
    return _best(lambda: subprocess.run(command, check=True), lambda: None, 1)


def _best(work: Callable[[], object], wait: Callable[[], None], repeats: int = REPEATS) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _lasting(work: Callable[[], object], wait: Callable[[], None], seconds: float = LASTING) -> float:
    """The mean over so many seconds on end."""
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds or not count:
        work()
        wait()
        count += 1
    return passed / count


def _causal(length: float) -> float:
    return length * (length + 1) / 2


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1]))))
