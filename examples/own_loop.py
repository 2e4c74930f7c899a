"""A training loop of your own: NovaRL's parts without its runs, directories and configuration.

    python examples/own_loop.py

The policy is given a digit and learns to count on, 7 -> 8 9 0 1, from random weights. The reward is the share of right
tokens. The loop samples by hand; credit, loss and update are NovaRL's.
"""

import torch
from torch import nn
from torch.distributions import Categorical

from novarl.algos import surrogates
from novarl.core.types import Prompt, Rollout, Scored, Sequence
from novarl.data.pack import pack
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Objective
from novarl.learn.optim import OptimSettings
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.models.plain import PlainModel

LENGTH, GROUP = 4, 8  # tokens in an answer, answers to each digit


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(10, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, tokens, position_ids):
        return self.head(self.rnn(self.embed(tokens))[0])


@torch.no_grad()
def play(model):
    tokens, logp = torch.arange(10).repeat_interleave(GROUP)[:, None], torch.zeros(10 * GROUP, 1)
    for _ in range(LENGTH):
        policy = Categorical(logits=model.logits(tokens, torch.arange(tokens.size(1)).expand_as(tokens))[:, -1])
        chosen = policy.sample()
        tokens, logp = torch.cat([tokens, chosen[:, None]], 1), torch.cat([logp, policy.log_prob(chosen)[:, None]], 1)
    mask, zeros = (False, *[True] * LENGTH), (0,) * (LENGTH + 1)  # the prompt is not trained on
    for index, (row, row_logp) in enumerate(zip(tokens.tolist(), logp.tolist(), strict=True)):
        sequence = Sequence(tuple(row), mask, tuple(row_logp), kept_logmass=zeros, versions=zeros)
        rollout = Rollout(Prompt(str(row[0]), (row[0],), ()), row[0], index % GROUP, (sequence,), (), "")
        reward = sum(row[t] == (row[0] + t) % 10 for t in range(1, LENGTH + 1)) / LENGTH
        yield Scored(rollout, {"count": reward}, reward)


torch.manual_seed(0)
model, credit = PlainModel(Counter()), CreditRule("group", {"norm_std": True})
objective, optim = Objective(surrogates.reinforce, aggregation="token", constant=1.0), OptimSettings(lr=0.01)
learner = PolicyLearner(model, Scorer(model), objective=objective, optim=optim, ranks=Ranks(), budget=10_000)
for step in range(1, 101):
    batch = pack(list(play(model)))
    record = learner.update(batch, scores := learner.score(batch), credit(batch, scores, None)[0])
    if step % 10 == 0:
        print(f"step {step:3}  reward {batch.reward.mean():.3f}  entropy {record['entropy']:.3f}")
