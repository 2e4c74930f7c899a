"""An environment of your own: the policy guesses a number twice, and in between is told "higher" or "lower".

    python examples/own_environment.py

An environment is a class with two coroutines, and every episode gets an object of it. `reset(prompt)` returns the
messages to begin with. `step(messages)` is given the conversation, the policy's answer last, and returns an `EnvStep`:
messages to append, a reward, and whether the episode is over. With `reward="environment"` an episode's reward is the
sum over its steps. Whoever begins with 2 and listens always wins; a random player wins 5 games in 9.
"""

import argparse
import random

import novarl
from novarl.core.types import EnvStep

QUESTION = "Guess: 1, 2 or 3? Round {}"


def hint(guess, secret):
    return "higher" if guess < secret else "lower"


class HigherLower:
    async def reset(self, prompt):
        self.secret = prompt.answer
        return prompt.messages

    async def step(self, messages):
        guess = messages[-1]["content"].strip()
        if guess == self.secret:
            return EnvStep(reward=1.0, done=True)
        return EnvStep(({"role": "user", "content": hint(guess, self.secret)},), reward=0.0, done=False)


def game(number, rng):
    """A game of a player who knows the rules and guesses at random."""
    first, second, secret = (rng.choice("123") for _ in range(3))
    texts = [QUESTION.format(number), first, hint(first, secret), second]
    roles = ["user", "assistant"] * 2
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--run-dir", default="runs/own-environment")
    args, rng = parser.parse_args(), random.Random(0)
    games = [game(number, rng) for number in range(200)]
    rows = [{"prompt": QUESTION.format(number), "answer": rng.choice("123")} for number in range(200)]
    with novarl.SFT(model="tiny", data=games, steps=40, run_dir=f"{args.run_dir}-sft") as rules:
        rules.run()
        start = rules.save(f"{args.run_dir}-start")
    trainer = novarl.RL(model=start, prompts=rows, env=HigherLower, reward="environment", algo="grpo", steps=args.steps,
                        rollout={"max_turns": 2, "max_tokens": 4}, run_dir=args.run_dir)  # fmt: skip
    summary = trainer.run()
    print(f"games won: {summary['before']['score']:.2f} before, {summary['after']['score']:.2f} after")
