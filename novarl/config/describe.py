"""A configuration in words: the batch arithmetic of a run, what it starts from and what it writes."""

from __future__ import annotations

from collections.abc import Sequence

from novarl.config.base import Config, RunConfig, TrainConfig
from novarl.config.describe_rl import algorithm, unread
from novarl.config.load import to_dict
from novarl.config.missing_files import absent
from novarl.config.preference import DPOConfig, PreferenceConfig, RMConfig
from novarl.config.tree import BUILT_IN_MODELS, EvalConfig, RLConfig, SampleConfig, SFTConfig
from novarl.config.unread import idle
from novarl.core.config_files import dump


def describe(config: Config, *, ran: Sequence[str] = ()) -> str:
    """What `novarl explain` prints: first in words, `ran` among them, then every key with its value.

    A null that the algorithm or the task decides is said to be theirs; `load.fill` puts in what they decide.
    """
    words, rest = _words(config), unread(config) if isinstance(config, RLConfig) else []
    text = dump({name: value for name, value in to_dict(config).items() if name not in rest})
    omitted = [f"(Left out, since nothing in this run reads them: {', '.join(rest)}.)"] if rest else []
    words += [f"Note: {note}." for note in absent(config)]
    words += ran
    return "\n".join([*words, "", "Every key, as this run sees it:", *omitted, "", text])


def _words(config: Config) -> list[str]:
    if isinstance(config, RLConfig):
        return [*_rl(config), *_training(config), _place(config)]
    if isinstance(config, SFTConfig):
        return [*_sft(config), *_training(config), _place(config)]
    if isinstance(config, PreferenceConfig):
        return [*_preference(config), *_training(config), _place(config)]
    if isinstance(config, EvalConfig):
        return [
            f"novarl eval: {config.model} on {_rows(config)}.",
            _greedy(config.eval.n, config.eval.k),
            _place(config),
        ]
    if isinstance(config, SampleConfig):
        asked = "one prompt" if config.prompt else "every line of the standard input"
        answers = f"{_count(config.n, 'answer')} of at most {config.sampling.max_tokens} tokens"
        return [f"novarl sample: {config.model} gives {answers} to {asked}."]
    return [f"novarl {config.kind}: {config.model}."]


def _rl(config: RLConfig) -> list[str]:
    trajectories = config.prompts_per_rollout * config.responses_per_prompt
    tokens = config.rollout.max_tokens and config.rollout.max_tokens * config.rollout.max_turns
    length = f"at most {tokens:,} tokens" if tokens else "as many tokens as the task allows"
    ceiling = f" ({trajectories * tokens:,} sampled tokens at most)" if tokens else ""
    updates = config.updates_per_rollout
    lines = [
        f"novarl rl: {config.model} learns {_rows(config)} with {config.algo}.",
        f"A step: {_count(config.prompts_per_rollout, 'prompt')} x {_count(config.responses_per_prompt, 'response')} = "
        f"{_count(trajectories, 'trajectory')} of {length}{ceiling}.",
    ]
    if updates is None:
        lines.append("The algorithm says how many optimiser updates a step has.")
    else:
        share = trajectories * config.epochs_per_rollout / updates
        passes = f" in {config.epochs_per_rollout} epochs" if config.epochs_per_rollout > 1 else ""
        lines.append(
            f"They are used for {_count(updates, 'optimiser update')}{passes}, {share:,.4g} trajectories an update, "
            f"in micro-batches of at most {config.micro.max_tokens:,} tokens."
        )
    total = f", {_count(config.steps * updates, 'optimiser update')}" if updates else ""
    most = f", at most {config.steps * trajectories * tokens:,} sampled tokens" if tokens else ""
    lines.append(f"In all: {_count(config.steps, 'step')}, {config.steps * trajectories:,} trajectories{most}{total}.")
    lines += algorithm(config)
    if warmup := _warmup(config):
        lines.append(warmup)
    if config.dynamic_sampling.enabled:
        lines.append(
            "Prompts whose responses all score the same are replaced, "
            f"up to {config.dynamic_sampling.max_refills} times a step."
        )
    every = f", after and every {_count(config.eval_every, 'step')}" if config.eval_every else " and after"
    return [*lines, _greedy(config.eval.n, config.eval.k, f" before{every}")]


def _warmup(config: RLConfig) -> str | None:
    if config.warmup is None:
        untrained = config.task is not None and config.model in BUILT_IN_MODELS
        return (
            "First it warms up on the task's demonstrations, for as many steps as the task says." if untrained else None
        )
    return (
        f"First it warms up on the task's demonstrations, {_count(config.warmup, 'step')}." if config.warmup else None
    )


def _sft(config: SFTConfig) -> list[str]:
    rows = config.steps and config.steps * config.batch_size
    span = (
        f"{_count(config.steps, 'step')}, {rows:,} rows"
        if config.steps and rows
        else f"{config.epochs or 1:g} times through the rows"
    )
    return [
        f"novarl sft: {config.model} learns from {_rows(config)}.",
        f"A step: {_count(config.batch_size, 'row')} and one optimiser update, "
        f"in micro-batches of at most {config.micro.max_tokens:,} tokens.",
        f"In all: {span}.",
    ]


def _preference(config: PreferenceConfig) -> list[str]:
    assert isinstance(config, DPOConfig | RMConfig)
    what = "learns" if isinstance(config, DPOConfig) else "becomes a reward model: it learns"
    rows = config.steps and config.steps * config.batch_size
    span = (
        f"{_count(config.steps, 'step')}, {rows:,} rows"
        if config.steps and rows
        else f"{config.epochs or 1:g} times through the rows"
    )
    scaled = "" if config.beta is None else f", beta {config.beta:g}"
    kept = config.loss in ("simpo", "orpo", "bt", "bce")
    reference = "" if kept else " The starting model's log-probabilities are computed once, before training."
    return [
        f"novarl {config.kind}: {config.model} {what} from {_rows(config)} with loss={config.loss}{scaled}.{reference}",
        f"A step: {_count(config.batch_size, 'row')} and one optimiser update, "
        f"in micro-batches of at most {config.micro.max_tokens:,} tokens.",
        f"In all: {span}.",
    ]


def _training(config: TrainConfig) -> list[str]:
    optim = config.optim
    rate = "a learning rate by kind of model" if optim.lr is None else f"learning rate {optim.lr:g}"
    warm = f", risen to over {_count(optim.warmup_steps, 'update')}" if optim.warmup_steps else ""
    warm = f", risen to over {optim.warmup_ratio:.4g} of all updates" if optim.warmup_ratio else warm
    fall = "" if optim.schedule == "constant" else f", then falling ({optim.schedule}) to {optim.min_lr_ratio:g} of it"
    saves = f"every {_count(config.save_every, 'step')} and at the end" if config.save_every else "at the end"
    best = " and the best" if config.keep_best else ""
    attention = {
        "auto": "PyTorch's kernel (on CUDA in bfloat16 flash attention, where it gives what a softmax gives)",
        "sdpa": "PyTorch's kernel",
        "flash": "flash attention, which must be able to run",
        "eager": "a plain softmax",
    }
    attends = f"Attention by {attention[config.attn]} (attn={config.attn}); beginnings that neighbours share, once, "
    attends += "unless the model runs through its own attention."
    if config.compile:
        apart = isinstance(config, RLConfig) and config.rollout.staleness > 0
        recorded = "" if apart else ", and on a GPU sampling is recorded"
        attends += f" The layers are compiled for learning{recorded} (compile=true)."
    lora, layers = config.lora, "all linear layers but the head"
    if lora.target != "all-linear":
        layers = f"the layers {', '.join(lora.target)}"
    adapters = f"Only adapters of rank {lora.rank} (alpha {lora.alpha:g}) on {layers} are trained."
    products = "Products with weights in bfloat16; trained weights stay float32."
    trained = [adapters] * (lora.rank > 0) + [products] * (config.dtype == "bfloat16")
    notes = [f"Note: {note}." for note in idle(config)]
    saved = f"Saves {saves}; keeps the last {config.keep}{best}."
    return [*trained, f"AdamW, {rate}{warm}{fall}.", attends, saved, *notes]


def _greedy(n: int, k: int, when: str = "") -> str:
    if n == 0:
        return "Evaluates nothing."
    samples = f", and {k} samples of each for pass@1 to pass@{k}" if k else ""
    return f"Evaluates{when} on at most {n:,} held-out rows: one greedy response{samples}."


def _place(config: RunConfig) -> str:
    where = config.run_dir or f"runs/{config.kind}-<time>"
    more = ", checkpoints/" if isinstance(config, TrainConfig) else ""
    return f"Writes to {where}: config.yaml, manifest.json, summary.json, metrics.jsonl, events.jsonl{more} and more."


def _rows(config: RunConfig) -> str:
    return f"the task {config.task}" if config.task else str(config.data)


def _count(n: int, noun: str) -> str:
    """
    >>> _count(1, "update"), _count(2000, "update"), _count(8, "trajectory")
    ('1 update', '2,000 updates', '8 trajectories')
    """
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun[:-1]}ies" if noun.endswith("y") else f"{n:,} {noun}s"
