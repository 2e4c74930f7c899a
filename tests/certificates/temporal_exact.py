"""Rewards along the way, and what every estimator over time is in expectation: by recursion over the tree of prefixes.

Written from the definitions alone; like `exact`, this file must not import the library. A dictionary by prefix holds a
number for a *state* (what has been said so far) or for a *move* (a prefix that is not empty: its last token, chosen in
the state before it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.certificates import exact
from tests.certificates.world import END, Answer, Policy, World

Numbers = dict[Answer, float]


@dataclass(frozen=True, slots=True)
class Episode:
    """A world whose every move has a reward. Answers that were cut rather than ended are worth `after` more: that is
    the bootstrap. `guess` are values of states that are wrong, as a critic's are."""

    world: World
    reward: Numbers
    after: Numbers
    guess: Numbers

    @property
    def moves(self) -> list[Answer]:
        return list(self.reward)


def make_episode(world: World, seed: int = 7) -> Episode:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> float:
        return float(torch.randn((), generator=generator, dtype=torch.float64))

    moves = sorted({answer[: t + 1] for answer in world.answers for t in range(len(answer))})
    return Episode(
        world,
        {move: normal() for move in moves},
        {answer: normal() for answer in world.answers if answer[-1] != END},
        {state: normal() for state in world.states},
    )


def chances(world: World, policy: Policy) -> Numbers:
    """The probability of each move in its state."""
    return {
        (*state, token): p
        for state in world.states
        for token, p in enumerate(exact.state_distribution(world, policy, state).tolist())
    }


def truncated(target: Numbers, sampler: Numbers, cap: float) -> Numbers:
    """min(cap mu, pi), made a distribution again: the policy that V-trace evaluates."""
    kept = {move: min(cap * sampler[move], p) for move, p in target.items()}
    total: Numbers = {}
    for move, p in kept.items():
        total[move[:-1]] = total.get(move[:-1], 0.0) + p
    return {move: p / total[move[:-1]] for move, p in kept.items()}


def following(episode: Episode, values: Numbers, move: Answer) -> float:
    """The value of the state that a move leads to."""
    return values[move] if move in values else episode.after.get(move, 0.0)


def state_values(episode: Episode, chance: Numbers, gamma: float) -> Numbers:
    """V(s) = sum_a p(a|s) (r + gamma V(s'))."""
    values: Numbers = {}
    for state in sorted(episode.world.states, key=len, reverse=True):
        moves = [(*state, token) for token in range(END + 1)]
        values[state] = sum(chance[m] * (episode.reward[m] + gamma * following(episode, values, m)) for m in moves)
    return values


def errors(episode: Episode, values: Numbers, gamma: float) -> Numbers:
    """delta of each move."""
    return {m: r + gamma * following(episode, values, m) - values[m[:-1]] for m, r in episode.reward.items()}


def unrolled(term: Numbers, chance: Numbers, weight: Numbers) -> Numbers:
    """X(move) = term(move) + sum over the next moves of p(next) weight(next) X(next)."""
    result: Numbers = {}
    for move in sorted(term, key=len, reverse=True):
        result[move] = term[move] + expected_next(move, result, chance, weight)
    return result


def expected_next(move: Answer, by_move: Numbers, chance: Numbers, weight: Numbers) -> float:
    """sum over the moves that can come next of p(next) weight(next) X(next), 0 after the last."""
    later = [(*move, token) for token in range(END + 1)]
    return sum(chance[m] * weight[m] * by_move[m] for m in later if m in by_move)


def constant(episode: Episode, number: float) -> Numbers:
    return dict.fromkeys(episode.reward, number)


def lambda_advantage(episode: Episode, values: Numbers, gamma: float, lam: float) -> Numbers:
    """E_pi[sum_l (gamma lam)^l delta_{t+l}] after each move."""
    world = episode.world
    return unrolled(errors(episode, values, gamma), chances(world, world.policy), constant(episode, gamma * lam))


def n_step_advantage(episode: Episode, values: Numbers, gamma: float, n: int) -> Numbers:
    """E_pi of n steps of reward, then the value, less the value of the first state."""
    chance = chances(episode.world, episode.world.policy)
    ahead = values
    for step in range(n):
        by_move = {m: r + gamma * following(episode, ahead, m) for m, r in episode.reward.items()}
        if step < n - 1:
            ahead = per_state(episode, chance, by_move)
    return {m: total - values[m[:-1]] for m, total in by_move.items()}


def per_state(episode: Episode, chance: Numbers, by_move: Numbers) -> Numbers:
    """The mean over a state's moves."""
    result = dict.fromkeys(episode.world.states, 0.0)
    for move, number in by_move.items():
        result[move[:-1]] += chance[move] * number
    return result


def ratios(episode: Episode) -> Numbers:
    """pi / mu of each move, mu the world's `behavior`."""
    world = episode.world
    over, under = chances(world, world.policy), chances(world, world.behavior)
    return {move: over[move] / under[move] for move in over}


def vtrace_errors(episode: Episode, values: Numbers, gamma: float, lam: float, rho_max: float, c_max: float) -> Numbers:
    """E_mu[v_t - V_t] after each move: rho delta + gamma lam c E_mu[the next one]."""
    delta, ratio = errors(episode, values, gamma), ratios(episode)
    chance, result = chances(episode.world, episode.world.behavior), dict[Answer, float]()
    for move in sorted(delta, key=len, reverse=True):
        later = expected_next(move, result, chance, constant(episode, 1.0))
        result[move] = min(rho_max, ratio[move]) * delta[move] + gamma * lam * min(c_max, ratio[move]) * later
    return result


def vtrace_advantage(
    episode: Episode, values: Numbers, gamma: float, lam: float, rho_max: float, c_max: float, pg_rho_max: float
) -> Numbers:
    """min(pg_rho_max, rho) (delta + gamma lam E_mu[the next state's v - V])."""
    delta, ratio = errors(episode, values, gamma), ratios(episode)
    error = vtrace_errors(episode, values, gamma, lam, rho_max, c_max)
    chance, one = chances(episode.world, episode.world.behavior), constant(episode, 1.0)
    return {
        m: min(pg_rho_max, ratio[m]) * (d + gamma * lam * expected_next(m, error, chance, one))
        for m, d in delta.items()
    }


def retrace_advantage(episode: Episode, values: Numbers, gamma: float, lam: float, c_max: float) -> Numbers:
    """delta + gamma lam E_mu[min(c_max, rho') A'], times the move's own ratio, as the surrogate weighs it."""
    ratio = ratios(episode)
    trace = {move: gamma * lam * min(c_max, rho) for move, rho in ratio.items()}
    chance = chances(episode.world, episode.world.behavior)
    plain = unrolled(errors(episode, values, gamma), chance, trace)
    return {move: ratio[move] * number for move, number in plain.items()}


def decision_returns(episode: Episode, gamma: float, low: float, high: float) -> Numbers:
    """E_mu of the return after each move, every step weighed by clip(rho), its own included."""
    chance = chances(episode.world, episode.world.behavior)
    one, result = constant(episode, 1.0), dict[Answer, float]()
    for move in sorted(episode.reward, key=len, reverse=True):
        later = expected_next(move, result, chance, one) + episode.after.get(move, 0.0)
        weight = min(max(ratios(episode)[move], low), high)
        result[move] = weight * (episode.reward[move] + gamma * later)
    return result


def trajectory_advantage(episode: Episode, values: Numbers, gamma: float, low: float, high: float) -> Tensor:
    """clip(pi(y)/mu(y)) (G_t - V(s_t)) for each answer and t [Y, longest]."""
    world = episode.world
    weight = (exact.fixed(world, world.policy) / exact.fixed(world, world.behavior)).clamp(low, high)
    table = torch.zeros(len(world.answers), world.longest, dtype=torch.float64)
    for y, answer in enumerate(world.answers):
        total = episode.after.get(answer, 0.0)
        for t in reversed(range(len(answer))):
            total = episode.reward[answer[: t + 1]] + gamma * total
            table[y, t] = weight[y] * (total - values[answer[:t]])
    return table


def step_of(answer: Answer, t: int) -> int:
    """The macro-step of a token: a new one begins after every token 0."""
    return answer[:t].count(0)


def segment_advantage(episode: Episode, values: Numbers) -> Tensor:
    """For each answer and t, of the macro-step that t is in: its rewards, and what the value gains [Y, longest]."""
    table = torch.zeros(len(episode.world.answers), episode.world.longest, dtype=torch.float64)
    for y, answer in enumerate(episode.world.answers):
        for step in {step_of(answer, t) for t in range(len(answer))}:
            inside = [t for t in range(len(answer)) if step_of(answer, t) == step]
            reward = sum(episode.reward[answer[: t + 1]] for t in inside)
            gain = following(episode, values, answer[: inside[-1] + 1]) - values[answer[: inside[0]]]
            table[y, inside] = reward + gain
    return table


def by_answer(episode: Episode, by_move: Numbers) -> Tensor:
    """A number of each move as a table of answers and positions [Y, longest], 0 past the end."""
    table = torch.zeros(len(episode.world.answers), episode.world.longest, dtype=torch.float64)
    for y, answer in enumerate(episode.world.answers):
        for t in range(len(answer)):
            table[y, t] = by_move[answer[: t + 1]]
    return table


def total_reward(episode: Episode) -> Tensor:
    """Everything an answer earns, and what it would after a cut [Y]."""
    after = [episode.after.get(answer, 0.0) for answer in episode.world.answers]
    return by_answer(episode, episode.reward).sum(1) + torch.tensor(after, dtype=torch.float64)


def gradient(episode: Episode, by_move: Numbers | Tensor, sampler: Policy) -> Tensor:
    """E over the sampler's answers of sum_t X(move_t) grad log pi(move_t)."""
    table = by_move if isinstance(by_move, Tensor) else by_answer(episode, by_move)
    return exact.score_gradient(episode.world, exact.fixed(episode.world, sampler)[:, None] * table)


def as_vector(numbers: Numbers) -> Tensor:
    """By state, in the order of prefixes."""
    return torch.tensor([numbers[state] for state in sorted(numbers)], dtype=torch.float64)
