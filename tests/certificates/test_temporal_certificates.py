"""That the certificates of credit over time are not vacuous, and what bias and variance the estimators have."""

from __future__ import annotations

import pytest

from tests.certificates import exact, temporal_exact as tree, temporal_moments
from tests.certificates.certificate import CAP, LONG
from tests.certificates.temporal_claims import EPISODE, SAMPLER, TARGET, true_values


def test_every_cap_is_active_and_none_always() -> None:
    ratio = tree.ratios(EPISODE).values()
    assert min(ratio) < 0.9 < 1.0 < 1.05 < CAP < max(ratio)
    whole = exact.fixed(LONG, LONG.policy) / exact.fixed(LONG, LONG.behavior)
    assert (whole < 0.9).any() and (whole > CAP).any() and ((whole > 0.9) & (whole < CAP)).any()


def test_the_policy_that_vtrace_evaluates_lies_between_the_two() -> None:
    fixed = [tree.as_vector(tree.state_values(EPISODE, policy, 1.0)) for policy in (TARGET, SAMPLER)]
    between = tree.as_vector(tree.state_values(EPISODE, tree.truncated(TARGET, SAMPLER, CAP), 1.0))
    assert all((between - end).abs().max() > 1e-3 for end in fixed)
    assert tree.truncated(TARGET, SAMPLER, 1e9) == pytest.approx(TARGET)
    assert tree.truncated(TARGET, SAMPLER, 1e-9) == pytest.approx(SAMPLER)


def test_answers_are_cut_and_ended_and_steps_are_longer_than_tokens() -> None:
    assert EPISODE.after and len(EPISODE.after) < len(LONG.answers)
    steps = [[tree.step_of(answer, t) for t in range(len(answer))] for answer in LONG.answers]
    assert any(len(set(ids)) < len(ids) for ids in steps) and any(len(set(ids)) > 1 for ids in steps)
    assert max(abs(true_values()[state] - guess) for state, guess in EPISODE.guess.items()) > 0.5


def test_bias_and_variance() -> None:
    """lambda trades one for the other; truncation takes variance away; only the whole ratio has no bias off policy."""
    found = {}
    for variants, sampler in ((temporal_moments.ON_POLICY, None), (temporal_moments.OFF_POLICY, LONG.behavior)):
        for name, (function, options) in variants.items():
            for values in (True, False):
                found[name, sampler is None, values] = temporal_moments.moments(
                    function, options, exact_values=values, sampler=sampler
                )
    assert all(found[name, True, True][0] < 1e-8 for name in temporal_moments.ON_POLICY)
    biases = [found[name, True, False][0] for name in temporal_moments.ON_POLICY][:4]
    assert biases == sorted(biases, reverse=True) and biases[0] > 1e-2 and biases[3] < 1e-8
    whole = "clipped_is per trajectory, no clip"
    for values in (True, False):
        unbiased = [name for name in temporal_moments.OFF_POLICY if found[name, False, values][0] < 1e-8]
        assert unbiased == [whole]
        for level in ("decision", "trajectory"):
            capped, free = f"clipped_is per {level}, at most 1.1", f"clipped_is per {level}, no clip"
            assert found[capped, False, values][1] < found[free, False, values][1]
