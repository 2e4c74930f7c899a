"""Decoding by recorded steps. A CPU has no CUDA graphs, so here a step is recorded as a list of PyTorch operators on
fixed tensors: what a graph replays, without the GPU, and with nothing of Python's in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from novarl.core.errors import NovaError
from novarl.core.types import Completion, Sampling
from novarl.engines.local import decode, matrices, recorded, runner as runners
from novarl.engines.local.decode import LeanDecoder
from novarl.engines.local.engine import LocalEngine, sample_all
from novarl.engines.local.recorded import OFTEN
from novarl.engines.local.runner import ModelRunner
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.load import Policy, load

from .conftest import echo, full_logits

BACK = OFTEN + 4
"""Steps that a test runs: the first makes tables for its cache, the next are counted, and three are replayed."""
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "item", "lift_fresh")
"""Operators that wait for the GPU, or bring numbers of Python's to it: neither can be recorded."""


class NothingWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], (list, tuple)) else ())
        )
        if name in WAITS or masks:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return func(*args, **(kwargs or {}))


class Operators:
    """What `recorded.Recorder` is on a GPU. `recordings` counts them, `replays` how often they ran."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, function: Callable[[], object]) -> Callable[[], None]:
        self.recordings += 1
        with NothingWaits():
            graph = make_fx(function)()
        assert not list(graph.graph.find_nodes(op="placeholder"))

        def replay() -> None:
            self.replays += 1
            graph()

        return replay

    def forget(self) -> None:
        pass


@pytest.fixture(params=["products", "fused kernel"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Operators:
    """Steps are recorded, with the cache, the weights and (fused kernel) the attention that a GPU has."""
    found = Operators()
    monkeypatch.setattr(runners, "records", lambda model: True)
    monkeypatch.setattr(recorded, "Recorder", lambda: found)
    monkeypatch.setattr(LeanDecoder, "slab", None)
    for module in (matrices, runners):
        monkeypatch.setattr(module, "can_pack", lambda weight: False)
    if request.param == "fused kernel":
        products = decode._Attention.__init__

        def as_on_a_gpu(self: Any, positions: Tensor, *arguments: Any) -> None:
            products(self, positions, *arguments)
            self._by_products = False
            segments = arguments[1]
            self._masks = [decode.attention_mask(positions[start:stop], extent) for start, stop, extent in segments]

        monkeypatch.setattr(decode._Attention, "__init__", as_on_a_gpu)
    return found


def requests(count: int, *, tokens: int = 90) -> list[tuple[list[int], Sampling, str]]:
    """Prompts of many lengths in groups of three, ends at many lengths."""
    rng = random.Random(5)
    asked = []
    for index in range(count):
        prompt, sampling = echo(rng.randrange(9, 60), rng=rng), Sampling(max_tokens=rng.randrange(5, tokens), seed=3)
        asked += [(prompt, sampling, f"{index} {member}") for member in range(3)]
    return asked


def sample(policy: Policy, *, max_batch: int = 20) -> list[Completion]:
    engine = LocalEngine(policy.model, ByteTokenizer(), eos_ids=[10], context=512, max_batch=max_batch)
    return sample_all(engine, requests(14))


def test_recorded_steps_sample_what_steps_do(
    policy: Policy, operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come, fork, go and move; the cache grows; tokens stay the same, and log-probabilities up to rounding."""
    found = sample(policy)
    assert operators.recordings > 2 and operators.replays > 20 * operators.recordings
    monkeypatch.setattr(runners, "records", lambda model: False)
    true = sample(policy)
    assert len({one.tokens for one in true}) > 20, "samples that do not vary show nothing"
    assert [one.tokens for one in found] == [one.tokens for one in true]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in true]
    for mine, theirs in zip(found, true, strict=True):
        assert mine.logp == pytest.approx(theirs.logp, abs=1e-4)


def runner_and_rows(policy: Policy, count: int = 5) -> tuple[ModelRunner, list[list[int]], Any]:
    """A runner, texts, and a cache that holds all but the last BACK tokens of each."""
    runner, rng = ModelRunner(policy.model), random.Random(8)
    texts = [echo(30 + 7 * row, rng=rng) for row in range(count)]
    cache = runner.new_cache()
    cache.reserve(256, rows=8)
    for row, prefill in enumerate(runner.prefill([tuple(text[:-BACK]) for text in texts])):
        cache.insert([row], prefill.cache, [prefill.row], length=len(prefill.prompt))
    return runner, texts, cache


def feed(runner: ModelRunner, texts: list[list[int]], cache: Any, back: int) -> Tensor:
    """The logits after the token that is `back` from the end of each text, in 8 rows of which the last only pad."""
    idle = [0] * (8 - len(texts))
    tokens = torch.tensor([*(text[-back] for text in texts), *idle])
    at = torch.tensor([*(len(text) - back for text in texts), *idle])
    return runner.decode(tokens, at, cache, [(0, 8, cache.extent(int(at.max()) + 1))])[: len(texts)].clone()


def test_replayed_logits_are_those_of_a_plain_forward_pass(policy: Policy, operators: Operators) -> None:
    runner, texts, cache = runner_and_rows(policy)
    for back in range(BACK, 0, -1):
        logits = feed(runner, texts, cache, back)
        true = [full_logits(policy.model, text)[-back] for text in texts]
        torch.testing.assert_close(logits, torch.stack(true), rtol=1e-3, atol=1e-3)
    assert operators.recordings == 1 and operators.replays == 1 + 3  # one replay is the look whether it is right


def test_a_cache_that_moved_and_new_weights_are_recorded_anew(operators: Operators) -> None:
    policy = load("tiny", seed=2)
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(20)
    runner, texts, cache = runner_and_rows(policy)
    for back in range(BACK, 2, -1):
        feed(runner, texts, cache, back)
    assert operators.recordings == 1
    cache.reserve(600)
    moved = feed(runner, texts, cache, 2)
    torch.testing.assert_close(
        moved, torch.stack([full_logits(policy.model, text)[-2] for text in texts]), rtol=1e-3, atol=1e-3
    )
    before = operators.replays
    for _ in range(OFTEN + 1):
        feed(runner, texts, cache, 1)
    assert operators.recordings == 2 and operators.replays > before
    with torch.no_grad():
        policy.model.model.layers[-1].self_attn.v_proj.weight.mul_(-100)  # of which a recording has a stacked copy
    old = feed(runner, texts, cache, 1)
    runner.refresh()
    assert (feed(runner, texts, cache, 1) - old).norm() > 0.1 * old.norm(), "new weights must show"


@pytest.mark.parametrize("fault", ["waits", "forgets an input"])
def test_what_cannot_be_recorded_is_refused_by_name(
    policy: Policy, operators: Operators, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    runner, texts, cache = runner_and_rows(policy)
    original = LeanDecoder.hidden

    def hidden(self: LeanDecoder, tokens: Tensor, *arguments: Any) -> Tensor:
        if fault == "waits":
            assert int(tokens.max()) >= 0
        return original(self, tokens, *arguments)

    if fault == "forgets an input":
        monkeypatch.setattr(Operators, "__call__", lambda self, function: lambda: None)
    monkeypatch.setattr(LeanDecoder, "hidden", hidden)
    problem = (
        "cannot be captured as a CUDA graph: operation not permitted"
        if fault == "waits"
        else "logits of the CUDA graph have a relative error of 1"
    )
    with pytest.raises(NovaError, match=problem) as caught:
        for back in range(BACK, 0, -1):
            feed(runner, texts, cache, back)
    assert "leave compile out" in str(caught.value)


def test_without_memory_for_a_recording_steps_go_on(
    policy: Policy, operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, texts, cache = runner_and_rows(policy)
    tried = []

    def full(self: Operators, function: Callable[[], object]) -> Any:
        tried.append(function)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Operators, "__call__", full)
    for back in range(BACK, 0, -1):
        true = torch.stack([full_logits(policy.model, text)[-back] for text in texts])
        torch.testing.assert_close(feed(runner, texts, cache, back), true, rtol=1e-3, atol=1e-3)
    assert len(tried) == 1, "once is enough"


def test_tables_that_a_longer_prompt_replaces_are_recorded_anew(policy: Policy, operators: Operators) -> None:
    """A GPU would read memory that is somebody else's by then: so recordings hold what they read, and go with it."""
    runner, texts, cache = runner_and_rows(policy)
    for back in range(BACK, 2, -1):
        feed(runner, texts, cache, back)
    assert runner._lean is not None and runner._recorded is not None and operators.recordings == 1
    held = runner._lean.tables
    assert all(any(table is one for one in runner._recorded._memory) for table in held)
    runner.prefill([tuple(echo(300, rng=random.Random(1)))])
    assert runner._lean.tables[0] is not held[0], "no longer prompt"
    replays = operators.replays
    feed(runner, texts, cache, 2)
    assert operators.replays == replays and not any(held[0] is one for one in runner._recorded._memory)


def test_a_model_that_has_diverged_is_not_called_a_bad_recording(operators: Operators) -> None:
    diverged = load("tiny", seed=2)
    runner, texts, cache = runner_and_rows(diverged)
    with torch.no_grad():
        diverged.model.lm_head.weight.fill_(torch.nan)
    for back in range(BACK, 0, -1):
        assert feed(runner, texts, cache, back).isnan().all()
    assert operators.recordings == 1


class Graph:
    """The calls that a CUDA graph gets, in their order."""

    calls: ClassVar[list[Any]] = []

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self.calls.append(("begin", pool))

    def capture_end(self) -> None:
        self.calls.append("end")
        if "break" in self.calls:
            raise RuntimeError("operation failed due to a previous error during capture")

    def pool(self) -> str:
        return f"the pool of {self.calls.index(('begin', None))}"

    def replay(self) -> None:
        self.calls.append("replay")


def test_recordings_share_memory_and_tell_why_one_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls alone: what they do takes a GPU."""
    monkeypatch.setattr(Graph, "calls", [])
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    recorder = recorded.Recorder()

    def run(name: str) -> None:
        Graph.calls.append(name)
        if name == "break":
            raise RuntimeError("operation not permitted when stream is capturing")
        if name == "full" and Graph.calls.count("full") == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    replay = recorder(lambda: run("first"))
    recorder(lambda: run("second"))
    replay()
    assert Graph.calls == [("begin", None), "first", "end", ("begin", "the pool of 0"), "second", "end", "replay"]
    Graph.calls.clear()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: Graph.calls.append("emptied"))
    recorder.forget()
    recorder(lambda: run("full"))
    assert Graph.calls == [("begin", None), "full", "end", "emptied", ("begin", None), "full", "end"]
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder(lambda: run("break"))
    assert Graph.calls[-1] == "end"


def test_only_a_gpu_records_and_only_where_it_is_asked_to() -> None:
    def model(device: str, *, compiled: bool) -> Any:
        parameter = SimpleNamespace(device=torch.device(device))
        return SimpleNamespace(layers_are_compiled=compiled, parameters=lambda: iter([parameter]))

    assert recorded.records(model("cuda", compiled=True))
    assert not recorded.records(model("cuda", compiled=False))
    assert not recorded.records(model("cpu", compiled=True))
    assert not recorded.records(load("tiny").model)
