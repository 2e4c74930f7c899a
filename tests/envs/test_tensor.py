"""The tensor environments: what they pay, and that their optima are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from novarl.core.types import TensorEnv
from novarl.envs.tensor import Directions, PreferenceBandit

PROMPTS = Path(__file__).parents[2] / "examples" / "bandit" / "prompts.jsonl"


def average(env: TensorEnv, choose: object, *, episodes: int = 4000) -> float:
    observation, over, rewards = env.reset(episodes), torch.tensor(False), []
    while not over.all():
        observation, reward, over = env.step(choose(observation))  # type: ignore[operator]
        rewards.append(reward)
    return float(torch.stack(rewards).mean())


@pytest.mark.parametrize(
    ("point", "action"), [((-1, -0.1), 0), ((0.1, -1), 1), ((1, 0.1), 2), ((-0.1, 1), 3), ((-1.0, 0.0), 0)]
)
def test_the_right_direction_is_the_sector(point: tuple[float, float], action: int) -> None:
    assert Directions().right(torch.tensor([point])).tolist() == [action]


def test_directions_pay_one_for_the_right_action_only() -> None:
    env = Directions()
    assert average(env, env.right) == env.optimum == 1.0
    assert average(env, lambda seen: (env.right(seen) + 1) % 4) == 0.0
    blind = average(env, lambda seen: torch.zeros(len(seen), dtype=torch.int64))
    assert blind == pytest.approx(0.25, abs=0.02)


def test_directions_last_their_horizon_and_repeat_with_their_seed() -> None:
    env, twin = Directions(horizon=3, seed=5), Directions(horizon=3, seed=5)
    assert torch.equal(env.reset(2), twin.reset(2))
    dones = [env.step(torch.zeros(2, dtype=torch.int64))[2].tolist() for _ in range(3)]
    assert dones == [[False, False], [False, False], [True, True]]
    assert not torch.equal(Directions(seed=6).reset(2), Directions(seed=5).reset(2))


def test_the_bandit_pays_its_table() -> None:
    env = PreferenceBandit.read(PROMPTS, seed=3)
    table = [[1.2, 0.0, -0.5], [0.0, 1.1, -0.6], [0.6, -0.2, 1.0], [-0.1, 0.4, 0.9]]
    torch.testing.assert_close(env.rewards, torch.tensor(table))
    assert env.optimum == pytest.approx(1.05)
    assert env.texts == ("Prefer action 0", "Prefer action 1", "Action 2 wins", "Action 2 slightly better")
    seen = env.reset(500)
    which = [next(i for i in range(4) if torch.equal(row, env.features[i])) for row in seen]
    assert set(which) == {0, 1, 2, 3}
    actions = torch.arange(500) % 3
    _, rewards, dones = env.step(actions)
    assert rewards.tolist() == pytest.approx([table[p][a] for p, a in zip(which, actions.tolist(), strict=True)])
    assert dones.all()


def test_a_bandit_with_a_row_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="2 prompts have features, 1 have rewards"):
        PreferenceBandit(torch.zeros(2, 3), torch.zeros(1, 3))
