"""Advantages by hand-made numbers, for every estimator and every place of the KL."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from novarl.core.errors import NovaError
from novarl.core.types import Batch, Credit, Prompt, Rollout, Scored, Scores, Sequence
from novarl.data.pack import pack
from novarl.learn.credit import CreditRule
from novarl.learn.plan import per_trajectory

LENGTHS = (1, 2, 3, 1, 2)
GROUPS = (7, 7, 7, 2, 2)
REWARDS = (1.0, 0.0, 2.0, 0.5, 0.5)
TWINS = {7: 0.25, 2: 1.0}


def trajectory(group: int, length: int, reward: float, *, role: str = "train") -> Scored:
    """Two tokens of prompt and an answer; the longest is told in two sequences."""
    cuts = (1, length - 1) if length == 3 else (length,)
    sequences = []
    for cut in cuts:
        size = 2 + cut
        none = (0.0,) * size
        sequences.append(Sequence((5,) * size, (False, False, *(True,) * cut), none, none, (0,) * size))
    rollout = Rollout(Prompt("p", (5, 5), ()), group, 0, tuple(sequences), (), "", role=role)  # type: ignore[arg-type]
    return Scored(rollout, {}, reward)


def batch(*, twins: bool = False, dtype: torch.dtype = torch.float64) -> Batch:
    items = [trajectory(*row) for row in zip(GROUPS, LENGTHS, REWARDS, strict=True)]
    if twins:
        items[1:1] = [trajectory(group, 2, reward, role="baseline") for group, reward in TWINS.items()]
    return pack(items, dtype=dtype)


def by_trajectory(of: Batch, credit: Credit) -> list[float]:
    """The advantage of each trained trajectory, which all its tokens must share; and nothing outside the mask."""
    owner = torch.repeat_interleave(of.traj, of.cu_seqlens.diff())
    assert not bool(credit.advantage[~of.mask].any())
    values = []
    for trajectory in (~of.baseline).nonzero().flatten().tolist():
        tokens = credit.advantage[of.mask & (owner == trajectory)]
        assert len(tokens) and bool((tokens == tokens[0]).all())
        values.append(tokens[0].item())
    return values


def give(
    rule: CreditRule, scores: Scores | None = None, ema: float | None = None, *, twins: bool = False
) -> list[float]:
    whole = batch(twins=twins)
    credit, _, _ = rule(whole, scores or Scores(), ema)
    assert credit.advantage.dtype == torch.float64, "float64 in, float64 out"
    return by_trajectory(whole, credit)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("none", [1.0, 0.0, 2.0, 0.5, 0.5]),
        ("mean", [0.2, -0.8, 1.2, -0.3, -0.3]),
        ("group", [0.0, -1.0, 1.0, 0.0, 0.0]),
        ("leave_one_out", [0.0, -1.5, 1.5, 0.0, 0.0]),
        ("scst", [0.75, -0.25, 1.75, -0.5, -0.5]),
    ],
)
def test_baselines(estimator: str, expected: list[float]) -> None:
    assert give(CreditRule(estimator), twins=True) == pytest.approx(expected, abs=1e-12)


def test_twins_change_nothing_where_nobody_asks_for_them() -> None:
    for estimator in ("none", "mean", "group", "leave_one_out"):
        assert give(CreditRule(estimator), twins=True) == give(CreditRule(estimator))


def test_group_standardised() -> None:
    """The sample deviation of 1, 0, 2 is 1; equal rewards stay 0."""
    assert give(CreditRule("group", {"norm_std": True})) == pytest.approx([0, -1, 1, 0, 0], abs=2e-6)


def test_moving_average() -> None:
    whole = batch()
    rule = CreditRule("ema", {"beta": 0.75})
    credit, _, ema = rule(whole, Scores(), None)
    assert by_trajectory(whole, credit) == list(REWARDS) and ema == pytest.approx(0.8)
    credit, _, ema = rule(whole, Scores(), 2.0)
    assert by_trajectory(whole, credit) == [-1.0, -2.0, 0.0, -1.5, -1.5]
    assert ema == pytest.approx(0.75 * 2.0 + 0.25 * 0.8)
    assert CreditRule("group")(whole, Scores(), 2.0)[2] == 2.0, "others leave it alone"


def kl_scores(of: Batch) -> tuple[Scores, Tensor]:
    """Log-probabilities that differ from the reference's by 0.1, 0.2, 0.3, ... from token to token; garbage outside."""
    difference = 0.1 * torch.arange(1, of.tokens.numel() + 1, dtype=torch.float64)
    reference = torch.full_like(difference, -3.0)
    return Scores(old_logp=torch.where(of.mask, reference + difference, 9.0), ref_logp=reference), difference * of.mask


def test_kl_as_reward_is_taken_off_before_the_baseline() -> None:
    """The sum over the trajectory, over both sequences of the one that has two."""
    whole = batch()
    scores, k1 = kl_scores(whole)
    owner = torch.repeat_interleave(whole.traj, whole.cu_seqlens.diff())
    totals = torch.stack([k1[owner == trajectory].sum() for trajectory in range(5)])
    rewards = torch.tensor(REWARDS) - 0.5 * totals
    expected = rewards - torch.tensor([rewards[:3].mean()] * 3 + [rewards[3:].mean()] * 2)
    assert give(CreditRule("group", kl_type="reward", kl_coef=0.5), scores) == pytest.approx(expected.tolist())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_as_advantage_is_taken_off_each_token(estimator: str) -> None:
    whole = batch()
    scores, k1 = kl_scores(whole)
    plain, _, _ = CreditRule("group")(whole, scores, None)
    rule = CreditRule("group", kl_type="advantage", kl_estimator=estimator, kl_coef=0.5)
    credit, record, _ = rule(whole, scores, None)
    kl = {"k1": k1, "k2": k1**2 / 2, "k3": k1 + (-k1).exp() - 1}[estimator]
    torch.testing.assert_close(credit.advantage, plain.advantage - 0.5 * kl, rtol=0, atol=1e-12)
    assert record["kl_penalty"] == pytest.approx(0.5 * kl[whole.mask].mean().item()) and record["kl_coef"] == 0.5


def test_kl_as_loss_is_none_of_its_business() -> None:
    whole = batch()
    scores, _ = kl_scores(whole)
    _, record, _ = CreditRule("group", kl_type="loss", kl_coef=0.5)(whole, scores, None)
    assert "kl_penalty" not in record
    assert give(CreditRule("group", kl_type="loss", kl_coef=0.5), scores) == give(CreditRule("group"))


@pytest.mark.parametrize("kind", ["reward", "advantage"])
def test_kl_needs_a_reference(kind: str) -> None:
    with pytest.raises(NovaError, match="requires a reference"):
        CreditRule("group", kl_type=kind, kl_coef=0.5)(batch(), Scores(), None)


def test_whitened_over_all_trained_tokens() -> None:
    whole = batch(twins=True)
    credit, record, _ = CreditRule("none", whiten=True)(whole, Scores(), None)
    tokens = torch.tensor([1.0, 0.0, 0.0, 2.0, 2.0, 2.0, 0.5, 0.5, 0.5], dtype=torch.float64)
    torch.testing.assert_close(credit.advantage[whole.mask], (tokens - tokens.mean()) / tokens.std(), rtol=0, atol=1e-7)
    assert record["advantage_mean"] == pytest.approx(0.0, abs=1e-12)
    assert not bool(credit.advantage[~whole.mask].any())


def test_reinforce_pp_whitened_is_what_others_compute() -> None:
    """verl and OpenRLHF: less the group's mean, then mean and deviation over all trained tokens."""
    of = batch()
    found, _, _ = CreditRule("reinforce_pp", whiten=True)(of, Scores(), None)
    owner = torch.repeat_interleave(of.traj, of.cu_seqlens.diff())
    means = torch.stack([of.reward[of.group == group].mean() for group in of.group])
    tokens = (of.reward - means)[owner][of.mask]
    wanted = (tokens - tokens.mean()) / tokens.std()
    torch.testing.assert_close(found.advantage[of.mask], wanted, atol=1e-5, rtol=1e-5)


def test_what_it_reports() -> None:
    _, record, _ = CreditRule("none")(batch(twins=True), Scores(), None)
    tokens = torch.tensor([1.0, 0.0, 0.0, 2.0, 2.0, 2.0, 0.5, 0.5, 0.5], dtype=torch.float64)
    assert record == {
        "advantage_mean": pytest.approx(tokens.mean().item()),
        "advantage_std": pytest.approx(tokens.std(unbiased=False).item()),
    }


def test_the_batch_is_left_as_it_was() -> None:
    whole = batch(twins=True)
    scores, _ = kl_scores(whole)
    before = whole.reward.clone()
    CreditRule("scst", kl_type="reward", kl_coef=1.0)(whole, scores, None)
    assert torch.equal(whole.reward, before)


def test_unknown_estimator() -> None:
    with pytest.raises(NovaError, match="unknown estimator 'gea'"):
        give(CreditRule("gea"))


def test_float32_stays_float32() -> None:
    credit, _, _ = CreditRule("group", {"norm_std": True})(batch(dtype=torch.float32), Scores(), None)
    assert credit.advantage.dtype == torch.float32


FLAT_GROUP = [0.0, -2.0, 2.0, 0.0, 0.0]
"""Twice the advantages of "group": the second of two groups has equal rewards, so B / (B - M) = 2 / 1."""


def test_gpg_makes_up_for_groups_of_equal_rewards() -> None:
    assert give(CreditRule("group", gpg=True), twins=True) == pytest.approx(FLAT_GROUP, abs=1e-12)
    assert give(CreditRule("leave_one_out", gpg=True)) == pytest.approx([1.5 * value for value in FLAT_GROUP])
    _, record, _ = CreditRule("group", gpg=True)(batch(), Scores(), None)
    assert record["gpg_alpha"] == 2.0


@pytest.mark.parametrize("estimator", ["none", "mean", "ema"])
def test_gpg_has_nothing_to_make_up_for_where_equal_rewards_are_learnt_from(estimator: str) -> None:
    assert give(CreditRule(estimator, gpg=True)) == give(CreditRule(estimator))


def over_time(whole: Batch, logp: float) -> Scores:
    """Values, and a policy whose tokens are each exp(logp) times as likely as the sampler thought."""
    values = torch.linspace(0.1, 0.9, whole.tokens.numel(), dtype=torch.float64)
    return Scores(old_logp=whole.behavior_logp + logp, values=values, bootstrap=torch.zeros_like(whole.reward))


def test_a_critic_of_retrace_is_fitted_to_the_target_of_vtrace() -> None:
    """Retrace's own returns estimate Q of the token, which is V's only on-policy."""
    whole = batch()
    options = {"gamma": 0.9, "lam": 0.8, "c_max": 1.0}
    for logp in (0.0, -0.5):
        scores = over_time(whole, logp)
        mine, _, _ = CreditRule("retrace", options=options)(whole, scores, None)
        vtrace, _, _ = CreditRule("vtrace", options=options)(whole, scores, None)
        assert mine.returns is not None and vtrace.returns is not None and scores.values is not None
        torch.testing.assert_close(mine.returns, vtrace.returns, rtol=0, atol=1e-12)
        own = (mine.advantage + scores.values) * whole.mask
        assert torch.allclose(mine.returns, own, atol=1e-12) == (logp == 0.0)


def test_primes_greedy_answers_are_no_siblings() -> None:
    """Advantages of the sampled answers are the same whether greedy twins were scored beside them or not."""
    rule, found = CreditRule("prime"), []
    for twins in (False, True):
        whole = batch(twins=twins)
        process = torch.where(whole.mask, torch.ones_like(whole.behavior_logp), 0.0)
        credit, _, _ = rule(whole, Scores(token_reward=process * whole.position_ids), None)
        found.append(credit.advantage[whole.mask])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_sums_are_of_the_trained_tokens_of_all_sequences_of_a_trajectory() -> None:
    """The third has two sequences; greedy twins and prompts have no trained token, and may hold anything."""
    whole = batch(twins=True)
    column = torch.where(whole.mask, 2.0, float("nan")).requires_grad_()
    assert per_trajectory(whole, column).tolist() == [2.0, 0.0, 0.0, 4.0, 6.0, 2.0, 4.0]
    per_trajectory(whole, column).sum().backward()
    assert column.grad is not None and torch.equal(column.grad, whole.mask.to(column))
