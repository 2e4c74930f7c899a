"""Watch an OpenRLHF run with NovaRL: an object of ours in the place of OpenRLHF's TensorBoard logger.

    python examples/openrlhf_integration.py [RUN_DIR]

In OpenRLHF change one line of `BasePPOTrainer.__init__` (openrlhf/trainer/ppo_trainer.py):

    from novarl.integrations.openrlhf import NovaLogger
    self.tensorboard_logger = NovaLogger("runs/x", self.args)

OpenRLHF needs GPUs and Ray, so this file trains something much smaller, a softmax over four words, and logs what it
measures as OpenRLHF's trainer does: the same calls and the same names.
"""

import math
import random
import sys
import time

import novarl
from novarl.integrations.openrlhf import NovaLogger

WORDS = {"yes": 1.0, "no": 0.0, "perhaps": 0.25, "never": 0.0}
"""The answers and their rewards."""

RATE, SAMPLES = 0.3, 32


def softmax(weights):
    exponentials = [math.exp(weight) for weight in weights]
    return [value / sum(exponentials) for value in exponentials]


def step(weights, generator):
    """One update by REINFORCE with the mean as baseline. Returns OpenRLHF's `logs_dict` of the step."""
    began = time.perf_counter()
    words, before = list(WORDS), softmax(weights)
    chosen = generator.choices(range(len(words)), before, k=SAMPLES)
    rewards = [WORDS[words[place]] for place in chosen]
    mean = sum(rewards) / SAMPLES
    gradient = [0.0] * len(words)
    for place, reward in zip(chosen, rewards, strict=True):
        for other in range(len(words)):
            gradient[other] += (reward - mean) * ((other == place) - before[other]) / SAMPLES
    for place, value in enumerate(gradient):
        weights[place] += RATE * value
    after = softmax(weights)
    return {
        "policy_loss": -sum(r - mean for r in rewards) / SAMPLES,
        "ppo_kl": sum(p * math.log(p / q) for p, q in zip(before, after, strict=True)),
        "entropy_loss": -sum(p * math.log(p) for p in before),
        "actor_grad_norm": math.sqrt(sum(value * value for value in gradient)),
        "actor_lr": RATE,
        "rollout/reward_mean": mean,
        "rollout/reward_std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / (SAMPLES - 1)),
        "rollout/num_samples": float(SAMPLES),
        "timing/ppo_train": time.perf_counter() - began,
        "generated_samples": [f"Is it so? {words[chosen[0]]}", rewards[0]],
    }


def main():
    logger = NovaLogger(sys.argv[1] if len(sys.argv) > 1 else "runs/openrlhf")
    generator, weights = random.Random(0), [0.0] * len(WORDS)
    for number in range(1, 101):
        logger.log_train(number, step(weights, generator))
        if number % 50 == 0:
            logger.log_eval(number, {"eval_words_pass1": softmax(weights)[0]})
    logger.close()

    run = novarl.load_run(logger.path)
    rewards = run.metrics.series("reward_mean")
    print(f"wrote {run.path}: {len(run.metrics)} lines of metrics, reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")


if __name__ == "__main__":
    main()
