"""PPO from human feedback in one turn: learn the preferred actions without straying from where the policy began.

    python examples/ppo_rlhf_single_turn.py --iterations 120 --target-kl 0.3 --seed 1234

Four prompts, three actions, and a table of what each action is worth (examples/bandit). Everything that keeps RLHF
steady stands here in the order in which it happens: clipped updates, an entropy bonus, a KL penalty against a frozen
copy of the first policy, and a controller that raises the penalty where KL leaves [target / 1.5, target * 1.5] upwards
and lowers it where KL leaves downwards. The pieces are the library's: `algos` for the arithmetic, `envs` for the
bandit, `core.checkpoint` for what is saved.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from novarl.algos import kl, surrogates
from novarl.algos.advantages import gae
from novarl.algos.values import value_loss
from novarl.control.controllers import DeadBand
from novarl.core.checkpoint import Checkpoint, Checkpoints
from novarl.envs.tensor import PreferenceBandit
from novarl.models.reference import frozen_copy

PROMPTS = Path(__file__).parent / "bandit" / "prompts.jsonl"
CHECKPOINTS = Path("checkpoints/ppo_rlhf_single_turn")

EPISODES, EPOCHS, MINIBATCHES = 64, 4, 2
CLIP, VALUE_COEF, VALUE_CLIP, ENTROPY_COEF = 0.2, 0.5, 0.2, 0.01
KL_COEF, KL_SPEED, MAX_GRAD_NORM, LEARNING_RATE = 0.05, 1.1, 1.0, 1e-2


class Network(nn.Module):
    """Features [..., F] of prompts to action logits [..., A] and values [...]."""

    def __init__(self, features: int, actions: int, hidden: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, hidden), nn.Tanh())
        self.policy = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, 1)

    def forward(self, features: Tensor) -> tuple[Categorical, Tensor]:
        hidden = self.body(features)
        return Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One step of B episodes: columns [B], features [B, F]."""

    features: Tensor
    actions: Tensor
    logp: Tensor
    ref_logp: Tensor
    values: Tensor
    rewards: Tensor


@torch.no_grad()
def act(network: Network, reference: nn.Module, env: PreferenceBandit, generator: torch.Generator) -> Rollout:
    """Serve a batch of prompts, choose an action for each, and see what it is worth."""
    features = env.reset(EPISODES)
    policy, values = network(features)
    actions = torch.multinomial(policy.probs, 1, generator=generator).squeeze(-1)
    _, rewards, _ = env.step(actions)
    return Rollout(
        features, actions, policy.log_prob(actions), reference(features)[0].log_prob(actions), values, rewards
    )


def improve(
    network: Network,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    *,
    kl_coef: float,
    generator: torch.Generator,
) -> dict[str, float]:
    """Several epochs of clipped minibatch updates on one rollout; the means of what is logged."""
    column = torch.ones(EPISODES, 1, dtype=torch.bool)  # an episode is a row of one step, after which nothing follows
    rewards, values = rollout.rewards[:, None], rollout.values[:, None]
    estimate, returns = gae(rewards=rewards, values=values, mask=column, bootstrap=torch.zeros(EPISODES))
    # Not whitened: what a nat of KL costs is in units of reward, and must not change as rewards vary less.
    advantage, returns = estimate.squeeze(-1), returns.squeeze(-1)
    logged: dict[str, list[Tensor]] = defaultdict(list)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(EPISODES, generator=generator).chunk(MINIBATCHES):
            policy, current = network(rollout.features[chosen])
            mask = torch.ones(len(chosen), dtype=torch.bool)
            new, old = policy.log_prob(rollout.actions[chosen]), rollout.logp[chosen]
            loss, stats = surrogates.ppo_clip(new, old, advantage[chosen], mask, clip_low=CLIP, clip_high=CLIP)
            # k3 times the ratio: its gradient is that of KL(policy || reference), in later epochs too.
            penalty = kl.corrected(kl.k3(new, rollout.ref_logp[chosen]), new, old)
            value, _ = value_loss(current, rollout.values[chosen], returns[chosen], mask, clip=VALUE_CLIP)
            objective = -loss.mean() - kl_coef * penalty.mean() + ENTROPY_COEF * policy.entropy().mean()
            optimizer.zero_grad()
            (VALUE_COEF * value.mean() - objective).backward()
            nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            seen = {"objective": objective, "value_loss": value, "clip_fraction": stats["clip_fraction"]}
            for name, what in seen.items():
                logged[name].append(what.detach().float().mean())
    return {name: float(torch.stack(means).mean()) for name, means in logged.items()}


def train(iterations: int, target_kl: float, seed: int, folder: Path) -> tuple[Network, PreferenceBandit, Checkpoint]:
    """Train, printing a line per iteration, and save."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    env = PreferenceBandit.read(PROMPTS, seed=seed)
    network = Network(env.observation_size, env.actions)
    reference = frozen_copy(network)
    controller = DeadBand(coef=KL_COEF, target=target_kl, speed=KL_SPEED)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    for iteration in range(1, iterations + 1):
        start = time.perf_counter()
        with torch.no_grad():
            before, _ = network(env.features)
        rollout = act(network, reference, env, generator)
        logged = improve(network, optimizer, rollout, kl_coef=controller.coef, generator=generator)
        with torch.no_grad():
            (after, _), (first, _) = network(env.features), reference(env.features)
        to_reference = float(kl_divergence(after, first).mean())
        moved = float(kl_divergence(before, after).mean())
        print(
            f"iteration {iteration:3d}  reward {rollout.rewards.mean():.3f}  objective {logged['objective']:+.4f}"
            f"  kl {moved:.4f}  kl_to_ref {to_reference:.4f}  kl_coef {controller.coef:.4f}"
            f"  entropy {after.entropy().mean():.3f}  value_loss {logged['value_loss']:.4f}"
            f"  clip_fraction {logged['clip_fraction']:.3f}  episodes/s {EPISODES / (time.perf_counter() - start):.0f}"
        )
        controller.update(to_reference, EPISODES)
    state = {"iteration": iterations, "optimizer": moments(network, optimizer), "controller": controller.state_dict()}
    return network, env, save(network, state, folder, iterations)


def moments(network: Network, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state by the names of the parameters."""
    return {name: dict(optimizer.state[parameter]) for name, parameter in network.named_parameters()}


def save(network: Network, state: Mapping[str, Any], folder: Path, iterations: int) -> Checkpoint:
    """A whole checkpoint in safetensors and JSON, with `latest` beside it pointing to it."""

    def write_model(path: Path) -> None:
        path.mkdir()
        save_file(network.state_dict(), path / "model.safetensors")

    return Checkpoints(folder, keep=1).save(f"iteration-{iterations:06d}", state, write_model, order=iterations)


def report(network: Network, env: PreferenceBandit) -> None:
    """The learned probabilities of each prompt's actions, and what the policy is worth."""
    with torch.no_grad():
        chances = network(env.features)[0].probs
    for text, row in zip(env.texts, chances.tolist(), strict=True):
        print(f"{text:26s} {'  '.join(f'{chance:.3f}' for chance in row)}")
    print(f"expected reward {float((chances * env.rewards).sum(dim=1).mean()):.3f} of {env.optimum:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--target-kl", type=float, default=0.3, help="nats from the first policy to stay about")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--out", type=Path, default=CHECKPOINTS, help="where the checkpoint goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so small a network is slower on several
    network, env, saved = train(arguments.iterations, arguments.target_kl, arguments.seed, arguments.out)
    report(network, env)
    print(f"saved {saved.path}")


if __name__ == "__main__":
    main()
