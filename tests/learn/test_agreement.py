"""Sampler and learner agree on a healthy run; each way in which they may not is refused, and called by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from novarl.compose import rl, weights
from novarl.core.errors import NovaError
from novarl.core.types import Batch, Prompt, Record, Rollout, Sequence
from novarl.data.pack import pack
from novarl.data.render import render_prompt
from novarl.distributed.ranks import Ranks
from novarl.engines.local.engine import LocalEngine
from novarl.learn.agreement import TOLERANCES, Agreement, active_dropout, mismatch, switch_dropout_off
from novarl.learn.scorer import Scorer
from novarl.models.forward import Layout
from novarl.models.load import Policy
from novarl.run.play import Play
from novarl.run.sampler import Sampler
from tests.invariance import little_run
from tests.invariance.families import family_policy
from tests.invariance.sharp import perturbed, record, recorded, sharp_policy

CAUSES = {
    "temperature": r"the sampler's temperature is 0\.7, but the learner's is 1\.0",
    "template": r"the chat template renders the prompt differently",
    "dropout": r"dropout is enabled in the learner \(p=0\.1\)",
    "old weights": r"stale weights, the sampler used version 0, but the learner has 3",
    "other weights": r"not explained by temperature: the sampler's weights are stale or differ from the learner's",
    "mask": r"the mask excludes \d+ tokens that the policy sampled \(pad = eos",
}


@dataclass(frozen=True)
class Check:
    """The check of a run before its first update, with what a run gives it; faults are planted by `replace`."""

    policy: Policy
    temperature: float = 1.0
    version: int = 0
    layout: Layout = "auto"
    chat_template: bool = True
    tolerance: torch.dtype = torch.float32

    def __call__(self, rollouts: Seq[Rollout], batch: Batch) -> Record:
        policy = self.policy

        def logprobs(batch: Batch, temperature: float) -> torch.Tensor:
            scorer = Scorer(policy.model, temperature, chunk=64, layout=self.layout, compute_dtype=policy.compute_dtype)
            return scorer.logprobs(batch, Ranks(), 200)

        def render(prompt: Prompt) -> Seq[int]:
            return render_prompt(policy.tokenizer, prompt.messages, apply_chat_template=self.chat_template)

        return Agreement(
            model=policy.model,
            logprobs=logprobs,
            render=render,
            temperature=self.temperature,
            sampling_temperature=self.temperature,
            version=self.version,
            tolerance=TOLERANCES[self.tolerance],
        ).check(batch, rollouts)


def of(scored: Any) -> tuple[list[Rollout], Batch]:
    return [item.rollout for item in scored], pack(scored)


def causes(check: Check, rollouts: Seq[Rollout], batch: Batch) -> list[str]:
    """The causes that the refusal names; a healthy run is refused for none, and fails here."""
    with pytest.raises(NovaError) as raised:
        check(rollouts, batch)
    message = str(raised.value)
    assert "sampler and learner disagree" in message and "step 0" in message
    return [name for name, pattern in CAUSES.items() if re.search(pattern, message)]


@pytest.mark.parametrize("family", ["sharp", "gpt2", "moe"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_healthy_run_passes(family: str, layout: Layout) -> None:
    policy = sharp_policy() if family == "sharp" else family_policy(family)
    found = Check(policy, layout=layout)(*of(record(policy)))
    assert found.keys() == {"mismatch_mean", "mismatch_max"}
    assert 0.0 < found["mismatch_mean"] <= 1e-5 and found["mismatch_mean"] <= found["mismatch_max"] <= 1e-3


@pytest.mark.parametrize(("temperature", "step"), [(0.7, 0), (1.1, 6)])
def test_any_temperature_passes_that_both_sides_share(temperature: float, step: int) -> None:
    policy = sharp_policy()
    scored = record(policy, step=step, temperature=temperature)
    assert Check(policy, temperature=temperature)(*of(scored))["mismatch_mean"] <= 1e-5


def test_bfloat16_passes_with_a_tolerance_of_its_own() -> None:
    policy = replace(sharp_policy(), compute_dtype=torch.bfloat16)
    rollouts, batch = of(record(policy))
    found = Check(policy, tolerance=torch.bfloat16)(rollouts, batch)
    assert 0.0 < found["mismatch_mean"] <= 0.03 and math.isfinite(found["mismatch_max"])
    # A learner in float32 beside a sampler in bfloat16: what this tolerance is for, and float32's refuses.
    whole = replace(policy, compute_dtype=torch.float32)
    found = Check(whole, tolerance=torch.bfloat16)(rollouts, batch)
    assert 1e-3 < found["mismatch_mean"] <= 0.03
    assert causes(Check(whole), rollouts, batch) == ["other weights"]


def test_bfloat16_of_two_percent_far_off_tokens_is_refused() -> None:
    """The 99th percentile is looked at, so that one odd token in a thousand passes and two in a hundred do not."""
    _, batch = of(recorded())
    for share, fine in ((0.001, True), (0.02, False)):
        logp = torch.where(torch.arange(batch.tokens.numel()) % round(1 / share) == 0, 0.5, 0.0) + batch.behavior_logp
        batch_of_all = replace(batch, mask=torch.ones_like(batch.mask))
        assert mismatch(logp, batch_of_all, TOLERANCES[torch.bfloat16])[1] == fine


def test_nothing_to_compare_is_no_disagreement() -> None:
    _, batch = of(recorded())
    nothing = replace(batch, mask=torch.zeros_like(batch.mask))
    assert mismatch(torch.zeros_like(batch.behavior_logp), nothing, TOLERANCES[torch.float32]) == (
        {"mismatch_mean": 0.0, "mismatch_max": 0.0},
        True,
    )


def test_temperature() -> None:
    policy = sharp_policy()
    assert causes(Check(policy), *of(record(policy, temperature=0.7))) == ["temperature"]


def test_template() -> None:
    assert causes(Check(sharp_policy(), chat_template=False), *of(recorded())) == ["template"]


def test_weights_of_an_older_version() -> None:
    assert causes(Check(sharp_policy(), version=3), *of(recorded())) == ["old weights"]


@pytest.mark.parametrize("size", [1e-3, 0.1])
def test_weights_that_have_moved_under_the_same_version(size: float) -> None:
    """Also by as little as one update does."""
    policy = sharp_policy()
    assert causes(Check(replace(policy, model=perturbed(policy.model, size))), *of(recorded())) == ["other weights"]


def noisy(policy: Policy) -> Policy:
    """A built-in model with dropout behind the first MLP."""
    layer = policy.model.model.layers[0]  # type: ignore[union-attr, index]
    layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.1))  # type: ignore[union-attr]
    return policy


def test_dropout() -> None:
    policy = noisy(sharp_policy())
    policy.model.train()
    rollouts, batch = of(record(policy))
    assert causes(Check(policy), rollouts, batch) == ["dropout"]
    policy.model.eval()
    assert Check(policy)(rollouts, batch)["mismatch_mean"] <= 1e-5, "there, but off"
    policy.model.train()
    switch_dropout_off(policy.model)
    assert Check(policy)(rollouts, batch)["mismatch_mean"] <= 1e-5, "switched off for good"


def test_dropout_of_gpt2() -> None:
    """In the embedding, the attention and the residuals, as transformers writes it."""
    policy = family_policy("gpt2")
    dropouts = [module for module in policy.model.modules() if isinstance(module, nn.Dropout)]
    assert len(dropouts) == 7 and active_dropout(policy.model) == []
    rollouts, batch = of(record(policy))
    try:
        policy.model.train()
        for dropout in dropouts:
            dropout.p = 0.1
        assert active_dropout(policy.model) == [0.1] * 7
        assert causes(Check(policy, layout="padded"), rollouts, batch) == ["dropout"]
        switch_dropout_off(policy.model)
        assert Check(policy)(rollouts, batch)["mismatch_mean"] <= 1e-5
    finally:
        policy.model.eval()
        switch_dropout_off(policy.model)


def without_eos(sequence: Sequence, eos: int) -> Sequence:
    """Masked by comparing ids: whatever is the pad token is padding."""
    mask = tuple(chosen and token != eos for token, chosen in zip(sequence.tokens, sequence.mask, strict=True))
    return replace(sequence, mask=mask)


def test_pad_eos_mask_of_the_rollouts() -> None:
    policy = family_policy("gpt2")
    eos = policy.tokenizer.eos_token_id
    assert policy.tokenizer.pad_token_id == eos
    scored = [
        replace(item, rollout=replace(item.rollout, sequences=(without_eos(item.rollout.sequences[0], eos),)))
        for item in record(policy)
    ]
    assert causes(Check(policy), *of(scored)) == ["mask"]


def test_pad_eos_mask_of_the_batch() -> None:
    policy = family_policy("gpt2")
    rollouts, batch = of(record(policy))
    lost = batch.mask & (batch.tokens == policy.tokenizer.pad_token_id)
    assert int(lost.sum()) == len(rollouts)
    assert causes(Check(policy), rollouts, replace(batch, mask=batch.mask & ~lost)) == ["mask"]


def test_a_greedy_twin_is_not_taken_for_a_lost_token() -> None:
    """Its mask is empty in the batch, and should be."""
    scored = [replace(item, rollout=replace(item.rollout, role="baseline")) for item in recorded()[:6]]
    assert Check(sharp_policy())(*of([*scored, *recorded()[6:]]))["mismatch_mean"] <= 1e-5


# In a whole run, where the check is wired by `novarl rl`.


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*little_run.write(tmp_path_factory.mktemp("given")), "steps=1"]


def test_a_healthy_run_logs_the_distance(words: list[str], tmp_path: Path) -> None:
    little_run.run(words, tmp_path / "run")
    first = little_run.metrics(tmp_path / "run")[0]
    (event,) = [line for line in little_run.lines(tmp_path / "run" / "events.jsonl") if line["kind"] == "agreement"]
    for told in (first, event):
        assert 0.0 < told["mismatch_mean"] <= 1e-5 and told["mismatch_mean"] <= told["mismatch_max"] <= 1e-3


def cooler(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = Sampler.rollouts

    def cooled(self: Sampler, *rest: Any, **options: Any) -> Any:
        return rollouts(replace(self, sampling=replace(self.sampling, temperature=0.7)), *rest, **options)

    monkeypatch.setattr(Sampler, "rollouts", cooled)


def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Play.sample

    def sample_and_move(self: Any, *rest: Any) -> list[Rollout]:
        rollouts = sample(self, *rest)
        with torch.no_grad():
            for parameter in self.sampler.engine._runner.model.parameters():
                parameter.mul_(1.01)
        return rollouts

    monkeypatch.setattr(Play, "sample", sample_and_move)


def unversioned(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = LocalEngine.publish
    monkeypatch.setattr(LocalEngine, "publish", lambda self, weights, version: publish(self, weights, version - 1))


def rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl, "render_prompt", lambda *args, **options: (*render_prompt(*args, **options), 10))


def masked(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Play.sample

    def lose(rollout: Rollout) -> Rollout:
        return replace(rollout, sequences=tuple(without_eos(sequence, 257) for sequence in rollout.sequences))

    monkeypatch.setattr(Play, "sample", lambda self, *rest: [lose(rollout) for rollout in sample(self, *rest)])


def dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = weights.load

    def load(*args: Any, **options: Any) -> Policy:
        policy = noisy(loaded(*args, **options))
        policy.model.train()
        return policy

    monkeypatch.setattr(weights, "load", load)
    monkeypatch.setattr(weights, "switch_dropout_off", lambda model: None)


@pytest.mark.parametrize(
    ("plant", "cause"),
    [
        (cooler, CAUSES["temperature"]),
        (moved, CAUSES["other weights"]),
        (unversioned, "stale weights, the sampler used version -1, but the learner has 0"),
        (rendered, CAUSES["template"]),
        (masked, CAUSES["mask"]),
        (dropping, CAUSES["dropout"]),
    ],
)
def test_a_run_with_a_fault_is_refused(
    plant: Callable[[pytest.MonkeyPatch], None],
    cause: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(NovaError, match=cause):
        little_run.run(words, tmp_path / "run")
    assert little_run.metrics(tmp_path / "run") == [], "an update was made"
    assert not (tmp_path / "run" / "checkpoints").exists()
