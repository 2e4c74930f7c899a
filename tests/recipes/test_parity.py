"""Each recipe and the library, fed the same recorded rollouts, stay the same model: advantages, losses, gradients and
weights over five updates.

The recipe works on rows padded on the left, the library on sequences without padding; the one writes its formula out in
a dozen lines, the other puts it together from its table. Neither has seen the other's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from novarl.algos import axes, preference_losses as preference, surrogates
from novarl.algos.axes import keywords
from novarl.algos.named import ALGORITHMS, Algorithm
from novarl.core.types import Credit, Record, Scored, Scores
from novarl.data.pack import pack, pack_sequences
from novarl.data.pairs import Pair, pack_pairs
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.learn.critic import Critic, ValueScorer
from novarl.learn.objective import Objective
from novarl.learn.optim import Optimizer, OptimSettings
from novarl.learn.policy import PolicyLearner
from novarl.learn.preference import PreferenceLearner
from novarl.learn.prime import ProcessRewards
from novarl.learn.reward_model import HeadScorer, RewardModelLearner
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.learn.vine import Continuations, Estimate, State
from novarl.models.heads import with_head
from tests.invariance.gradients import LIMITS, distance as relative
from tests.recipes.world import (
    SIBLINGS,
    TEMPERATURE,
    Recorded,
    arguments,
    distance,
    recipe,
    recorded,
    scored_rollout,
    sequence,
    tokenizer,
    trained,
    untrained,
)

UPDATES = 5
RATE, CLIP_NORM = 2e-3, 0.5
OPTIM = OptimSettings(lr=RATE, betas=(0.9, 0.999), max_grad_norm=CLIP_NORM)
RANKS, BUDGET = Ranks(), 60
"""A budget of a few sequences, so that the library accumulates over several micro-batches."""
EXACT = 1e-10
SINGLE = 1e-6
"""What advantages, losses and weights may differ by in float32, padded here and packed there. Gradients are judged by
the limits of tests/invariance, against float64: an absolute bound says nothing of sums over hundreds of tokens whose
size depends on the model, a relative one sees a fault of any tensor, however small its entries."""


@dataclass
class Twin:
    """One algorithm as the library's row, and the recipe's side of the same update."""

    model: Any
    learner: PolicyLearner
    rule: CreditRule
    gradients: list[Tensor] = field(default_factory=list)

    def update(self, data: Recorded, scores: Scores, credit: Credit) -> Record:
        return watch(self.learner.optimizer, self.gradients, lambda: self.learner.update(data.batch, scores, credit))


def watch(optimizer: Optimizer, gradients: list[Tensor], update: Callable[[], Record]) -> Record:
    """Run a library update and keep the gradient that its optimiser was given, before it is clipped."""
    step = optimizer.step

    def spy() -> tuple[float, float]:
        gradients[:] = [gradient.clone() for gradient in optimizer.gradients()]
        return step()

    optimizer.step = spy  # type: ignore[method-assign]
    try:
        return update()
    finally:
        optimizer.step = step  # type: ignore[method-assign]


def twin(
    row: Algorithm, dtype: torch.dtype = torch.float64, *, rate: float = RATE, eps: float = 1e-8, **changes: Any
) -> Twin:
    """The library's learner and credit of a row of its table, on a new copy of the trained model."""
    row = replace(row, **changes)
    model = trained(dtype)
    bounds = keywords(axes.surrogate(row.surrogate).reads, row.options)
    objective = Objective(
        surrogate=partial(getattr(surrogates, row.surrogate), **bounds),
        aggregation=row.aggregation,
        constant=1.0,
        kl_loss_coef=row.kl_coef if row.kl_type == "loss" else 0.0,
        kl_estimator=row.kl_estimator,
    )
    reference = Scorer(trained(dtype), temperature=TEMPERATURE) if "reference" in row.needs else None
    learner = PolicyLearner(
        model,
        Scorer(model, temperature=TEMPERATURE),
        objective=objective,
        optim=replace(OPTIM, lr=rate, eps=eps),
        ranks=RANKS,
        budget=BUDGET,
        reference=reference,
        needs_old_logp=row.surrogate != "reinforce",
    )
    rule = CreditRule(
        row.estimator,
        keywords(axes.estimator(row.estimator).reads, row.options),
        whiten=row.whiten,
        kl_type=row.kl_type,
        kl_estimator=row.kl_estimator,
        kl_coef=row.kl_coef,
    )
    return Twin(model, learner, rule)


def adam(model: nn.Module, rate: float = RATE, eps: float = 1e-8) -> torch.optim.Optimizer:
    """As in the recipes' `train`."""
    return torch.optim.AdamW(model.parameters(), lr=rate, eps=eps, weight_decay=0.0)


def step(name: str, model: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> list[Tensor]:
    """The recipe's update; returns the gradient before it is clipped."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    recipe(name).update(model, optimizer, loss, CLIP_NORM)
    return list(gradients)


def read(name: str, model: Any, data: Recorded) -> Tensor:
    return recipe(name).logprobs(model, data.tokens, data.attention, TEMPERATURE)


def everywhere(advantage: Tensor, data: Recorded) -> Tensor:
    """An advantage per answer [B], or per token [B, T], in the columns of the packed batch."""
    rows = advantage[:, None].expand(data.mask.shape) if advantage.ndim == 1 else advantage
    return data.flat(rows * data.mask)


def check_data(data: Recorded) -> None:
    """What the comparison would be worth nothing without."""
    groups = data.rewards.view(-1, SIBLINGS)
    assert (groups.std(1) > 0).sum() >= 3, "rewards do not vary within groups"
    assert not data.attention.all(), "nothing is padded"
    assert len({int(row.sum()) for row in data.mask}) > 1, "all answers are equally long"
    chosen = data.batch.behavior_logp[data.batch.mask]
    assert chosen.mean() > -1.0, "the model has learnt nothing"


Losses = Callable[[Any, Recorded, Scores], tuple[Tensor, Callable[[], Tensor]]]


def assert_parity(name: str, library: Twin, losses: Losses, *, tolerance: float = EXACT, seed: int = 0) -> list[Record]:
    """Five updates, each on rollouts of its own, all recorded with the model before training; their Records.

    `losses(model, data, scores)` is the recipe's: its advantage, and its loss as a function of the weights. A float32
    gradient of the library's is held against the recipe's in float64 at the library's own weights: two float32 ones
    differ by the rounding of both, and by what it has done to their weights.
    """
    dtype = next(library.model.parameters()).dtype
    model = trained(dtype)
    optimizer, start, records = (
        adam(model, library.learner.optimizer.settings.lr, library.learner.optimizer.settings.eps),
        [p.detach().clone() for p in model.parameters()],
        [],
    )
    rollouts = [recorded(100 * seed + update, dtype) for update in range(UPDATES)]
    scores = [library.learner.score(data.batch) for data in rollouts]
    for data, known in zip(rollouts, scores, strict=True):
        check_data(data)
        advantage, loss = losses(model, data, known)
        credit, _, _ = library.rule(data.batch, known, None)
        assert distance([everywhere(advantage, data)], [credit.advantage]) < tolerance
        ours = loss()
        twice = deepcopy(library.model).double()
        gradients = step(name, model, optimizer, ours)
        if dtype != torch.float64:
            gradients = list(torch.autograd.grad(losses(twice, data, known)[1](), list(twice.parameters())))
        record = library.update(data, known, credit)
        assert abs(ours.item() - record["total_loss"]) < tolerance
        assert_gradients(gradients, library.gradients, tolerance)
        assert distance(list(model.parameters()), list(library.model.parameters())) < tolerance
        records.append(record)
    assert distance(start, list(model.parameters())) > 1e-3, "the weights did not move"
    return records


def assert_gradients(exact: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    """Float64 within the tolerance everywhere, float32 within the relative limits of tests/invariance."""
    if theirs[0].dtype == torch.float64:
        assert distance(exact, theirs) < tolerance, "gradients differ"
    else:
        found = relative(*({str(place): value for place, value in enumerate(side)} for side in (theirs, exact)))
        assert found.within(LIMITS[theirs[0].dtype]), f"gradients differ: {found}"


def rows_of(data: Recorded, column: Tensor | None) -> Tensor:
    """A packed column [N] as rows [B, T]."""
    assert column is not None
    return column.new_zeros(data.mask.shape).masked_scatter(data.attention, column)


def reinforce(model: Any, data: Recorded, _: Scores, *, baseline: str = "none") -> Any:
    module = recipe("reinforce")
    advantage, _ = module.advantages(data.rewards, None, None, arguments("reinforce", baseline=baseline))
    return advantage, lambda: module.reinforce_loss(read("reinforce", model, data), advantage, data.mask)


def rloo(model: Any, data: Recorded, _: Scores) -> Any:
    module = recipe("rloo")
    advantage = module.advantages(data.rewards, SIBLINGS)
    return advantage, lambda: module.rloo_loss(read("rloo", model, data), advantage, data.mask)


def grpo(model: Any, data: Recorded, _: Scores) -> Any:
    module, args = recipe("grpo"), arguments("grpo")
    dtype = next(model.parameters()).dtype
    advantage = module.advantages(data.rewards.to(dtype), SIBLINGS)
    start = trained(data.rewards.dtype).to(dtype)
    with torch.no_grad():
        old = read("grpo", start, data)
    return advantage, lambda: module.grpo_loss(read("grpo", model, data), old, old, advantage, data.mask, args)


@pytest.mark.parametrize("baseline", ["none", "mean"])
def test_reinforce(baseline: str) -> None:
    library = twin(ALGORITHMS["reinforce"], estimator=baseline)
    records = assert_parity("reinforce", library, partial(reinforce, baseline=baseline))
    assert len(records) == UPDATES


def test_rloo() -> None:
    assert len(assert_parity("rloo", twin(ALGORITHMS["rloo"]), rloo)) == UPDATES


def test_grpo() -> None:
    records = assert_parity("grpo", twin(ALGORITHMS["grpo"]), grpo)
    assert records[-1]["clip_fraction"] > 0, "the clip was never tried"
    assert records[-1]["kl_mean"] > 1e-3, "nor was the KL"


def test_grpo_in_single_precision() -> None:
    """The large eps keeps AdamW from blowing rounding up: a gradient of 1e-8, all of it rounding, would move its weight
    as far as one of 1, and where tensors happen to lie in memory would decide."""
    library = twin(ALGORITHMS["grpo"], torch.float32, rate=1e-3, eps=1e-4)
    assert len(assert_parity("grpo", library, grpo, tolerance=SINGLE)) == UPDATES


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.float64, 1e-8)])
def test_a_gradient_a_little_off_is_seen(dtype: torch.dtype, off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    library = twin(ALGORITHMS["grpo"], dtype, rate=1e-3)
    update = library.update

    def scaled(data: Recorded, scores: Scores, credit: Credit) -> Record:
        record = update(data, scores, credit)
        library.gradients[:] = [(1.0 + off) * gradient for gradient in library.gradients]
        return record

    monkeypatch.setattr(library, "update", scaled)
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_parity("grpo", library, grpo, tolerance=SINGLE if dtype == torch.float32 else EXACT)


def test_another_algorithm_is_told_apart() -> None:
    for row, name, losses in (("rloo", "reinforce", reinforce), ("reinforce", "rloo", rloo), ("dr_grpo", "grpo", grpo)):
        with pytest.raises(AssertionError):
            assert_parity(name, twin(ALGORITHMS[row]), losses)


def test_another_seed_ends_elsewhere() -> None:
    one, other = twin(ALGORITHMS["grpo"]), twin(ALGORITHMS["grpo"])
    assert_parity("grpo", one, grpo)
    assert_parity("grpo", other, grpo, seed=1)
    assert distance(list(one.model.parameters()), list(other.model.parameters())) > 1e-3


def test_moving_average_and_greedy_baselines() -> None:
    module, ours, theirs = recipe("reinforce"), None, None
    args, rule = arguments("reinforce", baseline="ema", ema_beta=0.7), CreditRule("ema", {"beta": 0.7})
    for seed in range(UPDATES):
        data = recorded(seed)
        advantage, ours = module.advantages(data.rewards, None, ours, args)
        credit, _, theirs = rule(data.batch, Scores(), theirs)
        assert distance([everywhere(advantage, data)], [credit.advantage]) < EXACT
        assert ours == pytest.approx(theirs, abs=EXACT)
    greedy = torch.linspace(0.0, 1.0, len(data.scored) // SIBLINGS, dtype=torch.float64)
    twins: list[Scored] = [
        scored_rollout(
            data.tokens[SIBLINGS * group],
            data.attention[SIBLINGS * group],
            data.mask[SIBLINGS * group],
            data.mask[SIBLINGS * group].double(),
            group=group,
            reward=value,
            role="baseline",
        )
        for group, value in enumerate(greedy.tolist())
    ]
    batch = pack([*data.scored, *twins], dtype=torch.float64)
    credit, _, _ = CreditRule("scst")(batch, Scores(), None)
    args = arguments("reinforce", baseline="scst")
    advantage, _ = module.advantages(data.rewards, greedy.repeat_interleave(SIBLINGS), None, args)
    flat = everywhere(advantage, data)
    assert distance([flat], [credit.advantage[: len(flat)]]) < EXACT


def test_ppo_and_its_critic() -> None:
    module, args = recipe("ppo"), arguments("ppo", kl_coef=0.1)
    library = twin(ALGORITHMS["ppo"], kl_coef=0.1, settings={"adv.lam": args.lam})
    value_model = with_head(trained(), separate=True)
    critic = Critic(ValueScorer(value_model), optim=replace(OPTIM, lr=5e-3), ranks=RANKS, budget=BUDGET)
    ours = module.Critic(trained()).double()
    ours_optimizer = torch.optim.AdamW(ours.parameters(), lr=5e-3, weight_decay=0.0)
    reference = noisy(trained())
    library.learner.reference = Scorer(reference, temperature=TEMPERATURE)
    model = trained()
    optimizer = adam(model)
    for seed in range(UPDATES):
        data = recorded(seed)
        check_data(data)
        known, _ = critic.supply(data.scored, data.batch, library.learner.score(data.batch), seed)
        credit, _, _ = library.rule(data.batch, known, None)
        with torch.no_grad():
            old, ref = read("ppo", model, data), read("ppo", reference, data)
            values = ours(data.tokens, data.attention)
        rewards = module.token_rewards(data.rewards, old, ref, data.mask, args.kl_coef)
        advantage, returns = module.gae(rewards, values, data.mask, args.gamma, args.lam)
        advantage = module.whiten(advantage, data.mask)
        assert distance([data.flat(values * data.mask)], [known.values]) < EXACT
        assert distance([data.flat(advantage)], [credit.advantage]) < EXACT
        assert distance([data.flat(returns)], [credit.returns]) < EXACT
        for _ in range(2):
            loss = module.ppo_loss(read("ppo", model, data), old, advantage, data.mask, args.clip)
            gradients = step("ppo", model, optimizer, loss)
            record = library.update(data, known, credit)
            assert abs(loss.item() - record["total_loss"]) < EXACT
            assert distance(gradients, library.gradients) < EXACT
        value_loss = module.value_loss(ours(data.tokens, data.attention), returns, data.mask)
        module.update(ours, ours_optimizer, value_loss, CLIP_NORM)
        assert abs(value_loss.item() - critic.learn(data.batch, known, credit)["value_loss"]) < EXACT
        assert distance(list(model.parameters()), list(library.model.parameters())) < EXACT
        assert distance(list(ours.head.parameters()), list(value_model.head.parameters())) < EXACT
        assert distance(list(ours.trunk.parameters()), list(value_model.model.base_model.parameters())) < EXACT
    assert values.abs().max() > 0.05, "the critic never said anything"


def noisy(model: Any) -> Any:
    """Another policy, for a reference or a reward model that the first one differs from."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def worth(prompt: Seq[int], answer: Seq[int]) -> float:
    """A made-up value of a state, so that both sides can be given the same one."""
    return ((7 * sum(prompt) + sum((i + 3) * token for i, token in enumerate(answer))) % 101) / 101


@pytest.mark.parametrize("step_end", ["", "a"])
def test_vineppo(step_end: str) -> None:
    module, args = recipe("vineppo"), arguments("vineppo")
    library = twin(ALGORITHMS["vineppo"])

    def estimate(states: Seq[State], _: int) -> list[Estimate]:
        return [Estimate(worth(state.prompt.tokens, state.answer), 0.0, 1) for state in states]

    vine = Continuations(estimate, tokenizer().decode, split=step_end, most=99, ranks=RANKS)
    model = trained()
    optimizer = adam(model)
    for seed in range(UPDATES):
        data = recorded(seed)
        check_data(data)
        known, _ = vine.supply(data.scored, data.batch, library.learner.score(data.batch), seed)
        credit, _, _ = library.rule(data.batch, known, None)
        asked = [row[keep].tolist() for row, keep in zip(data.tokens, data.attention & ~data.mask, strict=True)]
        replies = [tuple(row[keep].tolist()) for row, keep in zip(data.tokens, data.mask, strict=True)]
        begins = [module.step_begins(tokenizer(), reply, step_end) for reply in replies]
        assert max(map(len, begins)) > 1
        values = [
            [worth(prompt, reply[:begin]) for begin in starts]
            for prompt, reply, starts in zip(asked, replies, begins, strict=True)
        ]
        advantage = module.whiten(module.advantages(data.rewards, values, begins, data.mask), data.mask)
        assert distance([data.flat(advantage)], [credit.advantage]) < EXACT
        with torch.no_grad():
            old = read("vineppo", model, data)
        for _ in range(2):
            loss = module.ppo_loss(read("vineppo", model, data), old, advantage, data.mask, args.clip)
            gradients = step("vineppo", model, optimizer, loss)
            record = library.update(data, known, credit)
            assert abs(loss.item() - record["total_loss"]) < EXACT
            assert distance(gradients, library.gradients) < EXACT
        assert distance(list(model.parameters()), list(library.model.parameters())) < EXACT


def test_prime_and_its_reward_model() -> None:
    module, args = recipe("prime"), arguments("prime", beta=0.3)
    library = twin(ALGORITHMS["prime"])
    threshold, phi, theirs = 0.8, trained(), trained()
    scorer = Scorer(theirs, temperature=TEMPERATURE)
    settings: dict[str, Any] = {"beta": args.beta, "threshold": threshold, "optim": OPTIM}
    supplier = ProcessRewards(scorer, ranks=RANKS, budget=BUDGET, **settings)
    model, reference = trained(), trained()
    optimizer, phi_optimizer = adam(model), adam(phi)
    for seed in range(UPDATES):
        data = recorded(seed)
        check_data(data)
        known, record = supplier.supply(data.scored, data.batch, library.learner.score(data.batch), seed)
        credit, _, _ = library.rule(data.batch, known, None)
        with torch.no_grad():
            old, ref = read("prime", model, data), read("prime", reference, data)
        outcome = (data.rewards >= threshold).double()
        assert 0 < outcome.mean() < 1
        process = module.process_rewards(read("prime", phi, data), ref, data.mask, args.beta)
        loss = module.process_loss(process, outcome)
        assert abs(loss.item() - record["process_loss"]) < EXACT
        module.update(phi, phi_optimizer, loss, CLIP_NORM)
        with torch.no_grad():
            process = module.process_rewards(read("prime", phi, data), ref, data.mask, args.beta)
        advantage = module.advantages(process, data.rewards, data.mask, SIBLINGS)
        assert distance([data.flat(process)], [known.token_reward]) < EXACT
        assert distance([data.flat(advantage)], [credit.advantage]) < EXACT
        for _ in range(2):
            loss = module.ppo_loss(read("prime", model, data), old, advantage, data.mask, args.clip)
            gradients = step("prime", model, optimizer, loss)
            record = library.update(data, known, credit)
            assert abs(loss.item() - record["total_loss"]) < EXACT
            assert distance(gradients, library.gradients) < EXACT
        assert distance(list(model.parameters()), list(library.model.parameters())) < EXACT
        assert distance(list(phi.parameters()), list(theirs.parameters())) < EXACT
    assert process.abs().max() > 1e-3, "the reward model never said anything"


def sides(data: Recorded, per_row: Tensor) -> list[Pair]:
    """Rows 2i and 2i + 1 as the chosen and the rejected side of a pair; `per_row` [B, T] goes into behavior_logp."""
    found = [sequence(*row) for row in zip(data.tokens, data.attention, data.mask, per_row.double(), strict=True)]
    return [
        Pair(f"{i}", chosen, rejected) for i, (chosen, rejected) in enumerate(zip(found[::2], found[1::2], strict=True))
    ]


def test_dpo() -> None:
    module, args = recipe("dpo"), arguments("dpo")
    theirs, model, reference = trained(), trained(), noisy(trained())
    learner = PreferenceLearner(
        theirs, Scorer(theirs), loss="sigmoid", beta=args.beta, optim=OPTIM, ranks=RANKS, budget=BUDGET
    )
    assert preference.LOSSES["sigmoid"].reference
    optimizer, gradients = adam(model), []
    for seed in range(UPDATES):
        data = recorded(seed)
        with torch.no_grad():
            ref = module.logprobs(reference, data.tokens, data.attention, 1.0) * data.mask
        batch = pack_pairs(sides(data, ref), dtype=torch.float64)
        logp = (module.logprobs(model, data.tokens, data.attention, 1.0) * data.mask).sum(1)
        loss, margin = module.dpo_loss(logp, ref.sum(1), args.beta)
        ours = step("dpo", model, optimizer, loss)
        record = watch(learner.optimizer, gradients, lambda batch=batch: learner.update(batch))
        assert abs(loss.item() - record["loss"]) < EXACT
        assert margin.mean().item() == pytest.approx(record["reward_margin"], abs=EXACT)
        assert distance(ours, gradients) < EXACT
        assert distance(list(model.parameters()), list(theirs.parameters())) < EXACT
    assert distance(list(model.parameters()), list(trained().parameters())) > 1e-3


def test_reward_model() -> None:
    module, centring = recipe("reward_model"), 0.05
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(untrained(num_labels=1)).eval().double()
    model.base_model.load_state_dict(trained().base_model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    scorer = HeadScorer(with_head(trained()))
    scorer.model.head.bias.requires_grad_(False)  # a transformers head has none
    learner = RewardModelLearner(
        scorer.model, scorer, loss="bt", optim=OPTIM, ranks=RANKS, budget=BUDGET, centring=centring
    )
    optimizer = adam(model)
    for seed in range(UPDATES):
        data = recorded(seed)
        batch = pack_pairs(sides(data, torch.zeros(data.mask.shape)), dtype=torch.float64)
        # The recipe's texts end at the last column: its own rows are padded on the left alone.
        width, lengths = data.mask.shape[1], data.attention.sum(1)
        tokens, attention = torch.zeros_like(data.tokens), torch.zeros_like(data.attention)
        for row, length in enumerate(lengths.tolist()):
            tokens[row, width - length :] = data.tokens[row][data.attention[row]]
            attention[row, width - length :] = True
        both = module.rewards(model, tokens, attention)
        loss = module.preference_loss(both[0::2], both[1::2], centring)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        assert abs(loss.item() - learner.update(batch)["loss"]) < EXACT
        assert distance([model.score.weight], [scorer.model.head.weight]) < EXACT
        theirs = scorer.model.model.base_model.parameters()
        assert distance(list(model.base_model.parameters()), list(theirs)) < EXACT
    assert both.abs().max() > 0.01, "the head never said anything"


def test_sft() -> None:
    module = recipe("sft")
    theirs, model = trained(), trained()
    learner = SupervisedLearner(theirs, Scorer(theirs), optim=OPTIM, ranks=RANKS, budget=BUDGET)
    optimizer, gradients = adam(model), []
    for seed in range(UPDATES):
        data = recorded(seed)
        pairs = sides(data, torch.zeros(data.mask.shape))
        batch = pack_sequences([side for pair in pairs for side in (pair.chosen, pair.rejected)], dtype=torch.float64)
        count, total = int(data.mask.sum()), 0.0
        for part in torch.arange(len(data.tokens)).split(7):  # micro-batches of other sizes than the library's
            logp = module.logprobs(model, data.tokens[part], data.attention[part], 1.0)
            loss = module.sft_loss(logp, data.mask[part], count)
            loss.backward()
            total += loss.item()
        ours = [parameter.grad.clone() for parameter in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        record = watch(learner.optimizer, gradients, lambda batch=batch: learner.update(batch))
        assert abs(total - record["loss"]) < EXACT
        assert distance(ours, gradients) < EXACT
        assert distance(list(model.parameters()), list(theirs.parameters())) < EXACT
    assert distance(list(model.parameters()), list(trained().parameters())) > 1e-3
