"""PPO in the standard library: a policy learns to cross a slippery grid, in seconds, with nothing installed.

    python demo.py --seed 0

The policy is a table of preferences, one row per cell, and PPO is all here: episodes, generalized advantages, several
epochs of minibatches, the clipped ratio, its gradient by hand. What is printed is exact, not sampled: the expected
return of the policy, and of the best one there is, both computed from the grid's transition probabilities.
"""

from __future__ import annotations

import argparse
import math
import random
import time

GRID = (
    "S..#.",
    "..X..",
    ".#...",
    "...X.",
    "X...G",
)
"""S start, G goal (+1, the end), X pit (-1, the end), # wall; every step costs 0.04."""
STEP_COST = 0.04
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
ARROWS = "^>v<"
SLIP = 0.1
"""How often a step goes to one side instead, each side half the time."""
GAMMA = 0.95
LAMBDA = 0.9
CLIP = 0.2
EPISODES, LONGEST, EPOCHS, MINIBATCH = 32, 40, 4, 128
POLICY_RATE, VALUE_RATE = 4.0, 0.2

CELLS = [(row, column) for row in range(5) for column in range(5) if GRID[row][column] != "#"]
START = CELLS.index((0, 0))
OPEN = [state for state, (row, column) in enumerate(CELLS) if GRID[row][column] in "S."]

Step = tuple[int, int, float, float, bool]
"""State, action, log-probability of the action, reward, whether the episode ended here."""
Table = list[list[float]]


def outcomes(state: int, action: int) -> list[tuple[float, int, float, bool]]:
    """Where an action leads: (probability, next state, reward, end)."""
    found = []
    for turn, probability in ((0, 1 - SLIP), (1, SLIP / 2), (3, SLIP / 2)):
        row, column = CELLS[state]
        down, right = MOVES[(action + turn) % 4]
        there = (row + down, column + right)
        following = CELLS.index(there) if there in CELLS else state
        kind = GRID[CELLS[following][0]][CELLS[following][1]]
        found.append((probability, following, {"G": 1.0, "X": -1.0}.get(kind, 0.0) - STEP_COST, kind in "GX"))
    return found


WORLD = [[outcomes(state, action) for action in range(4)] for state in range(len(CELLS))]


def probabilities(preferences: list[float]) -> list[float]:
    """The softmax of one row."""
    top = max(preferences)
    weights = [math.exp(preference - top) for preference in preferences]
    total = sum(weights)
    return [weight / total for weight in weights]


def worth(policy: Table | None) -> float:
    """The exact expected return from the start under a policy, or under the best one (None): values iterated to a
    fixed point."""
    values = [0.0] * len(CELLS)
    chances = [probabilities(row) for row in policy] if policy is not None else None
    change = 1.0
    while change > 1e-10:
        change = 0.0
        for state, actions in enumerate(WORLD):
            each = [sum(p * (r + (0 if end else GAMMA * values[n])) for p, n, r, end in outs) for outs in actions]
            new = max(each) if chances is None else sum(c * q for c, q in zip(chances[state], each, strict=True))
            change = max(change, abs(new - values[state]))
            values[state] = new
    return values[START]


def play(policy: Table, rng: random.Random) -> list[Step]:
    """One episode, begun in any open cell, so that every cell is seen early."""
    steps: list[Step] = []
    state, over = rng.choice(OPEN), False
    while not over and len(steps) < LONGEST:
        chances = probabilities(policy[state])
        action = rng.choices(range(4), chances)[0]
        ways = WORLD[state][action]
        _, following, reward, over = rng.choices(ways, [way[0] for way in ways])[0]
        steps.append((state, action, math.log(chances[action]), reward, over))
        state = following
    return steps


def advantages(steps: list[Step], values: list[float]) -> list[float]:
    """Generalized advantage estimates: A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t."""
    found, following = [0.0] * len(steps), 0.0
    for t in reversed(range(len(steps))):
        state, _, _, reward, over = steps[t]
        # An episode cut off by the limit goes on in truth; its last state stands in for the one it would reach.
        next_value = 0.0 if over else values[steps[min(t + 1, len(steps) - 1)][0]]
        delta = reward + GAMMA * next_value - values[state]
        found[t] = following = delta + GAMMA * LAMBDA * following
    return found


def improve(policy: Table, values: list[float], episodes: list[list[Step]], rng: random.Random) -> None:
    """Several epochs of clipped updates on the same episodes; the values follow towards the returns."""
    samples = []
    for steps in episodes:
        for (state, action, logp, _, _), advantage in zip(steps, advantages(steps, values), strict=True):
            samples.append((state, action, logp, advantage, advantage + values[state]))
    spread = math.sqrt(sum(sample[3] ** 2 for sample in samples) / len(samples)) + 1e-8
    for _ in range(EPOCHS):
        rng.shuffle(samples)
        for begin in range(0, len(samples), MINIBATCH):
            batch = samples[begin : begin + MINIBATCH]
            gradient = [[0.0] * 4 for _ in policy]
            for state, action, old_logp, advantage, target in batch:
                chances = probabilities(policy[state])
                ratio = math.exp(math.log(chances[action]) - old_logp)
                values[state] += VALUE_RATE / EPOCHS * (target - values[state])
                # d min(r A, clip(r) A) / d preference: zero where the clip holds the ratio back.
                if (ratio > 1 + CLIP and advantage > 0) or (ratio < 1 - CLIP and advantage < 0):
                    continue
                for other in range(4):
                    slope = (1.0 if other == action else 0.0) - chances[other]
                    gradient[state][other] += ratio * advantage / spread * slope / len(batch)
            for row, slopes in zip(policy, gradient, strict=True):
                for other, slope in enumerate(slopes):
                    row[other] += POLICY_RATE * slope


def train(iterations: int, seed: int) -> tuple[Table, list[float]]:
    """The policy after training, and its exact expected return before and after each iteration."""
    rng = random.Random(seed)
    policy: Table = [[0.0] * 4 for _ in CELLS]
    values = [0.0] * len(CELLS)
    curve = [worth(policy)]
    for _ in range(iterations):
        improve(policy, values, [play(policy, rng) for _ in range(EPISODES)], rng)
        curve.append(worth(policy))
    return policy, curve


def draw(policy: Table) -> str:
    """The grid with the most likely move in each open cell."""
    lines = []
    for row, line in enumerate(GRID):
        cells = ""
        for column, kind in enumerate(line):
            best = policy[CELLS.index((row, column))] if kind in "S." else []
            cells += ARROWS[best.index(max(best))] if best else kind
        lines.append("    " + " ".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    best = worth(None)
    policy, curve = train(arguments.iterations, arguments.seed)
    print("expected return from the start, exactly:")
    for iteration in range(0, len(curve), max(1, arguments.iterations // 10)):
        way = (curve[iteration] - curve[0]) / (best - curve[0])
        print(f"  iteration {iteration:3d}   {curve[iteration]:+.3f}  {'#' * round(40 * way)}")
    print(f"  best there is   {best:+.3f}  {'#' * 40}\n")
    way = (curve[-1] - curve[0]) / (best - curve[0])
    print(f"before {curve[0]:+.3f}, after {curve[-1]:+.3f}: {100 * way:.0f} % of the way to the best policy,", end=" ")
    print(f"in {time.perf_counter() - start:.1f} s\n\nwhat it learned:\n{draw(policy)}")


if __name__ == "__main__":
    main()
