"""PPO on toys whose optimum is known: a tiny network learns them, in seconds on a CPU.

    python examples/minimal_ppo_sync.py --iterations 60 --seed 0
    python examples/minimal_ppo_sync.py --env bandit

Everything PPO needs stands here in the order in which it happens: act, reward, advantage, several epochs of clipped
minibatch updates. The surrogate comes from `novarl.algos`, the environments from `novarl.envs`: pointing the way
(observations are points in the plane, the right action is the sector a point lies in, the best policy earns 1 a step)
and the preference bandit of examples/bandit (1.05 a step).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from novarl.algos import surrogates
from novarl.envs.tensor import Directions, PreferenceBandit

Environment = Directions | PreferenceBandit
PROMPTS = Path(__file__).parent / "bandit" / "prompts.jsonl"

EPISODES, EPOCHS, MINIBATCHES = 128, 4, 4
GAMMA, LAMBDA, CLIP = 0.9, 0.95, 0.2
VALUE_COEF, ENTROPY_COEF, MAX_GRAD_NORM, LEARNING_RATE = 0.5, 0.03, 1.0, 1.7e-3


class Network(nn.Module):
    """Observations [..., F] to action logits [..., A] and values [...]."""

    def __init__(self, observation_size: int, actions: int, hidden: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observation_size, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.policy = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, 1)

    def forward(self, observations: Tensor) -> tuple[Categorical, Tensor]:
        hidden = self.body(observations)
        return Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


@dataclass(frozen=True, slots=True)
class Rollout:
    """What was seen and done in T steps of B episodes: columns [T, B], observations [T, B, F]."""

    observations: Tensor
    actions: Tensor
    logp: Tensor
    values: Tensor
    rewards: Tensor
    dones: Tensor


@torch.no_grad()
def act(network: Network, env: Environment, generator: torch.Generator) -> Rollout:
    """Play whole episodes with the current policy."""
    observation = env.reset(EPISODES)
    steps = []
    over = torch.zeros(EPISODES, dtype=torch.bool)
    while not over.all():
        policy, value = network(observation)
        action = torch.multinomial(policy.probs, 1, generator=generator).squeeze(-1)
        following, reward, over = env.step(action)
        steps.append((observation, action, policy.log_prob(action), value, reward, over))
        observation = following
    return Rollout(*(torch.stack(column) for column in zip(*steps, strict=True)))


def advantages(rollout: Rollout) -> Tensor:
    """Generalized advantage estimates [T, B]: A_t = delta_t + gamma lambda A_{t+1}, with nothing after an episode's
    end."""
    result = torch.zeros_like(rollout.rewards)
    following = torch.zeros_like(rollout.rewards[0])
    next_value = torch.zeros_like(following)
    for t in reversed(range(len(result))):
        goes_on = (~rollout.dones[t]).float()
        delta = rollout.rewards[t] + GAMMA * goes_on * next_value - rollout.values[t]
        following = result[t] = delta + GAMMA * LAMBDA * goes_on * following
        next_value = rollout.values[t]
    return result


def improve(network: Network, optimizer: torch.optim.Optimizer, rollout: Rollout, generator: torch.Generator) -> float:
    """Several epochs of clipped minibatch updates on one rollout; the share of samples that the clip held back."""
    estimate = advantages(rollout)
    returns = (estimate + rollout.values).flatten()
    scaled = ((estimate - estimate.mean()) / (estimate.std() + 1e-8)).flatten()
    observations, actions, logp = rollout.observations.flatten(0, 1), rollout.actions.flatten(), rollout.logp.flatten()
    clipped = []
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(actions), generator=generator).chunk(MINIBATCHES):
            policy, value = network(observations[chosen])
            mask = torch.ones(len(chosen), dtype=torch.bool)
            new, old = policy.log_prob(actions[chosen]), logp[chosen]
            loss, stats = surrogates.ppo_clip(new, old, scaled[chosen], mask, clip_low=CLIP, clip_high=CLIP)
            value_loss = (value - returns[chosen]).square().mean()
            total = loss.mean() + VALUE_COEF * value_loss - ENTROPY_COEF * policy.entropy().mean()
            optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            clipped.append(stats["clip_fraction"].float().mean())
    return float(torch.stack(clipped).mean())


def make(name: str, seed: int) -> Environment:
    """The environment of this name."""
    return Directions(seed=seed) if name == "directions" else PreferenceBandit.read(PROMPTS, seed=seed)


def train(env_name: str, iterations: int, seed: int) -> tuple[Network, Environment]:
    """Train, printing a line per iteration."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    env = make(env_name, seed)
    network = Network(env.observation_size, env.actions)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    for iteration in range(1, iterations + 1):
        start = time.perf_counter()
        rollout = act(network, env, generator)
        with torch.no_grad():
            before, _ = network(rollout.observations)
        clip_fraction = improve(network, optimizer, rollout, generator)
        with torch.no_grad():
            after, _ = network(rollout.observations)
        moved = kl_divergence(before, after).mean()
        rate = rollout.rewards.numel() / (time.perf_counter() - start)
        print(
            f"iteration {iteration:3d}  reward {rollout.rewards.mean():.3f}  kl {moved:.4f}"
            f"  entropy {after.entropy().mean():.3f}  clip_fraction {clip_fraction:.3f}  steps/s {rate:.0f}"
        )
    return network, env


def report(network: Network, env: Environment, seed: int) -> None:
    """The mean reward per step on fresh episodes, against the optimum; for the bandit, also the policy itself."""
    generator = torch.Generator().manual_seed(seed)
    reward = float(act(network, env, generator).rewards.mean())
    if isinstance(env, PreferenceBandit):
        with torch.no_grad():
            chances = network(env.features)[0].probs
        for text, row in zip(env.texts, chances.tolist(), strict=True):
            print(f"{text:26s} {'  '.join(f'{chance:.3f}' for chance in row)}")
        # Which prompts come up is luck: the table gives the policy's worth exactly.
        reward = float((chances * env.rewards).sum(dim=1).mean())
    print(f"final reward {reward:.3f} of {env.optimum:.3f}, {100 * reward / env.optimum:.1f} % of the optimum")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=["directions", "bandit"], default="directions")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so small a network is slower on several
    network, _ = train(arguments.env, arguments.iterations, arguments.seed)
    report(network, make(arguments.env, arguments.seed + 1), arguments.seed + 1)


if __name__ == "__main__":
    main()
