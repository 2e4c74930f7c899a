"""Memory that runs out in any micro-batch: the same gradient, counted and reported; and where it must be an error."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from novarl.core.bus import Bus
from novarl.core.errors import NovaError
from novarl.core.memory import first_line, out_of_memory
from novarl.core.types import Batch
from novarl.distributed.ranks import Ranks
from novarl.learn.critic import Critic, ValueScorer
from novarl.learn.fitting import MOST, SPLIT, Splits, fitting, joined, report
from novarl.learn.plan import plan
from novarl.learn.policy import PolicyLearner
from novarl.learn.prime import ProcessRewards
from novarl.learn.scorer import Scorer
from tests.compose.harness import ON_TASK, events, finished, metrics
from tests.invariance.gradients import Limits, distance, gradient, sharp_case

BUDGET = 50
SAME = Limits(1e-6, 1e-6)


def failing(times: int, after: Callable[[int], bool], error: BaseException) -> type[PolicyLearner]:
    """A learner whose backward pass dies half-way, `times` times, in the micro-batches that `after` picks."""

    class Failing(PolicyLearner):
        left, seen = times, 0

        def _backward(self, part: Batch, index: Tensor, **rest: Any) -> Tensor:
            number, type(self).seen = self.seen, self.seen + 1
            if self.left and after(number):
                type(self).left -= 1
                # Half of the gradients have arrived, and some of the metrics.
                hook = self.scorer.model.model.layers[1].register_full_backward_pre_hook(raises(error))  # type: ignore[union-attr, index]
                try:
                    return super()._backward(part, index, **rest)
                finally:
                    hook.remove()
            return super()._backward(part, index, **rest)

    return Failing


def raises(error: BaseException) -> Callable[..., None]:
    def hook(*_: object) -> None:
        raise error

    return hook


NO_MEMORY = (
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:130] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
)


@pytest.mark.parametrize("error", NO_MEMORY, ids=["python", "cpu", "cuda"])
def test_the_gradient_is_the_same_wherever_it_fails(error: BaseException) -> None:
    case = sharp_case(torch.float64)
    whole, count = gradient(case, budget=BUDGET), len(plan(case.batch, Ranks(), BUDGET))
    assert count >= 3
    for index in range(count):
        kind = failing(1, lambda number, index=index: number == index, error)  # type: ignore[misc]
        found = distance(gradient(case, budget=BUDGET, kind=kind), whole)
        assert kind.left == 0, "nothing failed"  # type: ignore[attr-defined]
        assert found.within(SAME), (index, found)


def test_gradients_that_are_not_taken_back_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sharp_case(torch.float64)
    whole = gradient(case, budget=BUDGET)
    monkeypatch.setattr("novarl.learn.optim.Optimizer.drop_gradients", lambda self: None)
    found = distance(gradient(case, budget=BUDGET, kind=failing(1, lambda number: number == 1, MemoryError())), whole)
    assert found.whole > 1e-3


def test_another_error_is_no_lack_of_memory() -> None:
    case = sharp_case(torch.float64)
    with pytest.raises(RuntimeError, match="size mismatch"):
        gradient(case, kind=failing(1, lambda number: True, RuntimeError("size mismatch")))
    assert not out_of_memory(ValueError("out of memory")) and not out_of_memory(FileNotFoundError(2, "no such file"))
    assert out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert out_of_memory(RuntimeError("unable to mmap 8 bytes from file </dev/shm/x>: Cannot allocate memory (12)"))
    unmapped = ImportError("PLEASE READ THIS\n\nlibtorch_cpu.so: failed to map segment from shared object\n")
    assert out_of_memory(unmapped) and first_line(unmapped).startswith("libtorch_cpu.so: failed to map")


def test_ten_in_a_row_are_one_clear_error() -> None:
    splits = Splits()

    def attempt(micro: Any) -> None:
        for _ in micro:
            raise NO_MEMORY[1]

    with pytest.raises(NovaError, match="10 times in a row") as raised:
        fitting([list(range(5000))], attempt, splits)
    assert "\n" not in str(raised.value) and "micro.max_tokens" in str(raised.value)
    assert splits.take() == 10


def test_of_two_records_of_an_update_splits_are_added() -> None:
    assert joined({SPLIT: 2.0, "a": 1.0}, {SPLIT: 1.0, "a": 3.0}) == {SPLIT: 3.0, "a": 3.0}
    assert joined({SPLIT: 2.0}, {"a": 1.0}) == {SPLIT: 2.0, "a": 1.0}
    assert joined({}, {"a": 1.0}) == {"a": 1.0}


@pytest.mark.parametrize(
    ("words", "places", "count", "updates"),
    [
        (("algo=ppo", "critic.shared=true"), [(ValueScorer, "__call__")], 1, 1),
        (
            ("algo=ppo", "updates_per_rollout=2", "critic.updates_per_rollout=4"),
            [(Critic, "_backward"), (PolicyLearner, "_backward")],
            6,
            2,
        ),
        (("algo=prime", "updates_per_rollout=2"), [(ProcessRewards, "_backward")], 1, 1),
    ],
    ids=["values", "critic and policy", "prime"],
)
def test_whoever_splits_in_a_step_its_event_says_so_once(
    words: tuple[str, ...],
    places: list[tuple[type, str]],
    count: int,
    updates: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first pass of each of their updates fails: of the policy's two, and of the critic's four beside them."""
    failed: set[tuple[object, int]] = set()

    def tight(honest: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, part: Batch, *rest: Any, **more: Any) -> Any:
            update = (honest, getattr(getattr(self, "optimizer", None), "update", 0))
            if part.reward.numel() > 1 and update not in failed:
                failed.add(update)
                raise MemoryError
            return honest(self, part, *rest, **more)

        return run

    for kind, name in places:
        monkeypatch.setattr(kind, name, tight(getattr(kind, name)))
    run = tmp_path / "run"
    finished("rl", *ON_TASK, *words, "steps=1", "prompts_per_rollout=4", f"run_dir={run}")
    told = events(run, "split_micro_batch")
    assert len(told) == updates and sum(event["count"] for event in told) == len(failed) == count
    assert sum(line.get(SPLIT, 0) for line in metrics(run)) == count


def test_a_trajectory_that_does_not_fit_alone_is_an_error_at_once() -> None:
    case = sharp_case(torch.float64)
    with pytest.raises(NovaError, match="a single trajectory does not fit"):
        gradient(case, budget=1, kind=failing(1, lambda number: True, MemoryError()))


def test_halves_in_order_and_every_one_again() -> None:
    seen: list[list[int]] = []
    undone = []

    def attempt(micro: Any) -> str:
        for part in micro:
            seen.append(part)
            if len(part) > 2:
                raise MemoryError
        return "done"

    splits = Splits()
    assert fitting([[0, 1], [2, 3, 4, 5, 6]], attempt, splits, undo=lambda: undone.append(1)) == "done"
    assert seen == [[0, 1], [2, 3, 4, 5, 6], [0, 1], [2, 3], [4, 5, 6], [0, 1], [2, 3], [4], [5, 6]]
    assert len(undone) == 2 and splits.take() == 2 and splits.take() == 0
    assert MOST == 10


def test_scoring_is_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sharp_case(torch.float64)
    scorer = Scorer(case.model, chunk=50)
    expected = scorer.logprobs(case.batch, Ranks(), 10**9)
    call = Scorer.__call__

    def small(self: Scorer, batch: Batch) -> tuple[Tensor, Tensor]:
        if batch.reward.numel() > 4:
            raise MemoryError
        return call(self, batch)

    monkeypatch.setattr(Scorer, "__call__", small)
    torch.testing.assert_close(scorer.logprobs(case.batch, Ranks(), 10**9), expected, rtol=1e-9, atol=1e-9)
    assert scorer.splits.take() >= 3


def test_an_event_says_that_the_run_is_no_longer_bit_exact() -> None:
    events: list[tuple[str, dict[str, Any]]] = []

    class Listener:
        def event(self, kind: str, fields: dict[str, Any]) -> None:
            events.append((kind, fields))

    bus = Bus([Listener()])  # type: ignore[list-item]
    report({}, 3, bus)
    assert events == []
    report({SPLIT: 2.0}, 3, bus)
    ((kind, fields),) = events
    assert kind == "split_micro_batch" and fields["count"] == 2 and fields["step"] == 3
    assert "not bit-reproducible" in fields["message"]


LIMITED = """
import resource, torch
torch.set_num_threads(1)
from novarl.core.types import Sequence
from novarl.data.pack import pack_sequences
from novarl.models.transformer import Decoder, DecoderConfig
from novarl.learn.optim import OptimSettings
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.distributed.ranks import Ranks

def row(index):
    n = 256
    tokens = tuple((31 * index + 7 * place) % 250 for place in range(n))
    none = (0.0,) * n
    return Sequence(tokens, (False, *(True,) * (n - 1)), none, none, (0,) * n)

def update(free):
    model = Decoder(DecoderConfig(256, 64, 512, 4, 2, 1, 32, initializer_range=0.1))
    learner = SupervisedLearner(
        model, Scorer(model, chunk=64), optim=OptimSettings(max_grad_norm=0.0), ranks=Ranks(), budget=10**9
    )
    caught = {}
    def step():
        caught.update({name: p.grad.clone() for name, p in model.named_parameters()})
        return 0.0, 0.0
    learner.optimizer.step = step
    if free:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + free, -1))
    batch = pack_sequences([row(index) for index in range(64)])
    record = learner.update(batch)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    return caught, record.get("split_micro_batches", 0.0), record["micro_batches"]

limited, splits, parts = update(150 << 20)
whole, none, one = update(0)
error = max(float((limited[n] - whole[n]).norm() / whole[n].norm()) for n in whole)
print(splits, none, parts, one, error)
"""


def test_a_process_whose_address_space_ends() -> None:
    """Real allocations fail: about 500 MB are needed at once, 150 MB are free."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    splits, none, parts, one, error = (float(word) for word in done.stdout.split())
    assert splits >= 1 and none == 0 and error < 2e-5
    assert parts == 1 + splits and one == 1, "those of the pass that came to its end"
