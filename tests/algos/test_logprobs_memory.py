"""No [tokens, vocabulary] tensor ever exists: by looking at every tensor made, and by the peak memory of a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from novarl.kernels.logprobs import chunked_logprobs, logits_logprobs

TOKENS, WIDTH, VOCABULARY, CHUNK = 96, 4, 64, 8
LARGEST = max(CHUNK * VOCABULARY, VOCABULARY * WIDTH, TOKENS * WIDTH)

PEAK = """
import resource, sys, torch
from novarl.kernels.logprobs import chunked_logprobs

torch.set_num_threads(1)
vocabulary, width, chunk = 32768, 32, 1024
weight = torch.randn(vocabulary, width, requires_grad=True)
for tokens in (2048, 16384):
    hidden = torch.randn(tokens, width, requires_grad=True)
    logp, entropy = chunked_logprobs(hidden, weight, torch.randint(vocabulary, (tokens,)), chunk=chunk)
    (logp.sum() + entropy.sum()).backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any tensor had that an operation returned, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.element_size()
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor)
        ]
        self.elements = max(self.elements, *sizes, 0)
        return result


def largest(outputs: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> int:
    hidden, weight = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    with LargestTensor() as seen:
        logp, entropy = outputs(hidden, weight, targets)
        (logp.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    return seen.elements


def test_no_tensor_of_tokens_times_vocabulary() -> None:
    assert largest(lambda h, w, t: chunked_logprobs(h, w, t, chunk=CHUNK)) <= LARGEST
    # The plain way, to see that the probe would have seen one.
    assert largest(lambda h, w, t: logits_logprobs(h @ w.T, t)) == TOKENS * VOCABULARY > LARGEST


def test_peak_memory_hardly_grows_with_the_tokens() -> None:
    """From 2k to 16k tokens, vocabulary 32k, chunk 1024: by under 5 % of the full logits, 2 GiB."""
    output = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True).stdout
    before, after = (int(line) for line in output.split())
    assert before > 1024 * 32768 * 4, "the probe did not see the scratch tensor"
    assert after - before < 0.05 * 16384 * 32768 * 4
