"""An algorithm of your own, outside the package: a surrogate and an estimator in the places of two of the table's axes.

    novarl rl task=sort loss.surrogate=examples/my_algorithm.py:spo adv.estimator=examples/my_algorithm.py:rank

Either works alone. Compare with `novarl rl task=sort`: the same seed samples the same first answers.
"""


def spo(logp, old_logp, advantage, mask, *, clip_high):
    """Minimized for each token: Simple Policy Optimization (arXiv 2401.16025), -(r A - |A| (r - 1)^2 / (2 epsilon)).

    PPO's clip drops the gradient beyond the bound; this one pulls the ratio back to it.
    """
    ratio = (logp - old_logp).exp()
    return advantage.abs() * (ratio - 1) ** 2 / (2 * clip_high) - ratio * advantage


def rank(rewards, group):
    """One advantage for each answer: answers to the same prompt that it beats, less those that beat it, as a share."""
    same = group[:, None] == group[None, :]
    wins = (rewards[:, None] > rewards[None, :]) & same
    return (wins.sum(1) - wins.sum(0)) / (same.sum(1) - 1).clamp(min=1).to(rewards)
