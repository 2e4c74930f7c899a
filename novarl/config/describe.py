"""A configuration in words: batch sizes, what a run starts from and what it writes."""

from __future__ import annotations

from collections.abc import Sequence

from novarl.config.base import Config, RunConfig, TrainConfig
from novarl.config.describe_rl import algorithm, unread
from novarl.config.load import to_dict
from novarl.config.notes import missing_files, without_effect
from novarl.config.preference import DPOConfig, PreferenceConfig, RMConfig
from novarl.config.tree import BUILT_IN_MODELS, EvalConfig, RLConfig, SampleConfig, SFTConfig
from novarl.core.config_files import dump
from novarl.core.errors import wrapped


def describe(config: Config, *, ran: Sequence[str] = ()) -> str:
    """The output of `novarl explain`: a summary with the lines `ran`, then every key. `load.fill` resolves nulls
    first."""
    words, rest = _words(config), unread(config) if isinstance(config, RLConfig) else []
    text = dump({name: value for name, value in to_dict(config).items() if name not in rest})
    omitted = [f"(Not shown because this run does not use them: {', '.join(rest)}.)"] if rest else []
    words += [f"Note: {note}." for note in missing_files(config)]
    words += ran
    words = [part for line in words for part in wrapped(line)]
    return "\n".join([*words, "", "All keys of this run:", *omitted, "", text])


def _words(config: Config) -> list[str]:
    if isinstance(config, RLConfig):
        return [*_rl(config), *_training(config), _place(config)]
    if isinstance(config, SFTConfig):
        return [*_sft(config), *_training(config), _place(config)]
    if isinstance(config, PreferenceConfig):
        return [*_preference(config), *_training(config), _place(config)]
    if isinstance(config, EvalConfig):
        return [
            f"novarl eval: evaluates {config.model} on {_rows(config)}.",
            _greedy(config.eval.n, config.eval.k),
            _place(config),
        ]
    if isinstance(config, SampleConfig):
        asked = "one prompt" if config.prompt else "each line of the standard input"
        answers = f"{_count(config.n, 'answer')} of at most {config.sampling.max_tokens} tokens"
        return [f"novarl sample: {config.model} generates {answers} for {asked}."]
    return [f"novarl {config.kind}: {config.model}."]


def _rl(config: RLConfig) -> list[str]:
    trajectories = config.prompts_per_rollout * config.responses_per_prompt
    tokens = config.rollout.max_tokens and config.rollout.max_tokens * config.rollout.max_turns
    length = f"at most {tokens:,} tokens" if tokens else "the task's maximum length"
    ceiling = f" (at most {trajectories * tokens:,} sampled tokens)" if tokens else ""
    updates = config.updates_per_rollout
    lines = [
        f"novarl rl: trains {config.model} on {_rows(config)} with {config.algo}.",
        f"Each step: {_count(config.prompts_per_rollout, 'prompt')} x "
        f"{_count(config.responses_per_prompt, 'response')} = "
        f"{_count(trajectories, 'trajectory')} of {length}{ceiling}.",
    ]
    if updates is None:
        lines.append("The number of optimizer updates per step is set by the algorithm.")
    else:
        share = trajectories * config.epochs_per_rollout / updates
        passes = f" over {config.epochs_per_rollout} epochs" if config.epochs_per_rollout > 1 else ""
        lines.append(
            f"Training: {_count(updates, 'optimizer update')} per step{passes}, {share:,.4g} trajectories per update, "
            f"in micro-batches of at most {config.micro.max_tokens:,} tokens."
        )
    total = f", {_count(config.steps * updates, 'optimizer update')}" if updates else ""
    most = f", at most {config.steps * trajectories * tokens:,} sampled tokens" if tokens else ""
    lines.append(f"Total: {_count(config.steps, 'step')}, {config.steps * trajectories:,} trajectories{most}{total}.")
    lines += algorithm(config)
    if warmup := _warmup(config):
        lines.append(warmup)
    if config.dynamic_sampling.enabled:
        lines.append(
            "Groups with identical rewards are replaced by new prompts, "
            f"up to {config.dynamic_sampling.max_refills} times per step."
        )
    during = f", and every {_count(config.eval_every, 'step')}" if config.eval_every else ""
    return [*lines, _greedy(config.eval.n, config.eval.k, f" before and after training{during},")]


def _warmup(config: RLConfig) -> str | None:
    if config.warmup is None and config.task is not None and config.model in BUILT_IN_MODELS:
        return "Warm-up: supervised steps on the task's demonstrations; the task sets the number."
    steps = config.warmup and _count(config.warmup, "supervised step")
    return f"Warm-up: {steps} on the task's demonstrations." if steps else None


def _sft(config: SFTConfig) -> list[str]:
    return [f"novarl sft: fine-tunes {config.model} on {_rows(config)}.", *_length(config)]


def _preference(config: PreferenceConfig) -> list[str]:
    assert isinstance(config, DPOConfig | RMConfig)
    what = "trains" if isinstance(config, DPOConfig) else "trains a reward model from"
    scaled = "" if config.beta is None else f", beta {config.beta:g}"
    kept = config.loss in ("simpo", "orpo", "bt", "bce")
    reference = "" if kept else " The initial model's log-probabilities are computed once, before training."
    return [
        f"novarl {config.kind}: {what} {config.model} on {_rows(config)} with loss={config.loss}{scaled}.{reference}",
        *_length(config),
    ]


def _length(config: SFTConfig | PreferenceConfig) -> list[str]:
    span = f"{config.epochs or 1:g} epoch{'s' * (config.epochs not in (None, 1))}"
    if config.steps:
        span = f"{_count(config.steps, 'step')}, {config.steps * config.batch_size:,} rows"
    return [
        f"Each step: {_count(config.batch_size, 'row')} and one optimizer update, "
        f"in micro-batches of at most {config.micro.max_tokens:,} tokens.",
        f"Total: {span}.",
    ]


def _training(config: TrainConfig) -> list[str]:
    optim = config.optim
    rate = "a learning rate by kind of model" if optim.lr is None else f"learning rate {optim.lr:g}"
    warm = f", warmup over {_count(optim.warmup_steps, 'update')}" if optim.warmup_steps else ""
    warm = f", warmup over {optim.warmup_ratio:.4g} of all updates" if optim.warmup_ratio else warm
    fall = "" if optim.schedule == "constant" else f", {optim.schedule} decay to {optim.min_lr_ratio:g} of the peak"
    saves = f"every {_count(config.save_every, 'step')} and at the end" if config.save_every else "at the end"
    best = " and the best one" if config.keep_best else ""
    attention = {
        "auto": "PyTorch's scaled dot-product attention (on CUDA in bfloat16 flash attention, if it passes a check)",
        "sdpa": "PyTorch's scaled dot-product attention",
        "flash": "flash attention",
        "eager": "a plain softmax",
    }
    attends = f"Attention (attn={config.attn}): {attention[config.attn]}. "
    attends += "Shared prompt prefixes are computed once, except for models that use their own attention."
    if config.compile:
        apart = isinstance(config, RLConfig) and config.rollout.staleness > 0
        recorded = "" if apart else "; on a GPU, sampling uses CUDA graphs"
        attends += f" Layers are compiled for training{recorded} (compile=true)."
    lora, layers = config.lora, "all linear layers except the head"
    if lora.target != "all-linear":
        layers = f"the layers {', '.join(lora.target)}"
    adapters = f"LoRA: only adapters of rank {lora.rank} (alpha {lora.alpha:g}) on {layers} are trained."
    products = "Matrix products are computed in bfloat16; trained weights stay in float32."
    trained = [adapters] * (lora.rank > 0) + [products] * (config.dtype == "bfloat16")
    notes = [f"Note: {note}." for note in without_effect(config)]
    saved = f"Checkpoints: saved {saves}; the last {config.keep}{best} are kept."
    return [*trained, f"AdamW, {rate}{warm}{fall}.", attends, saved, *notes]


def _greedy(n: int, k: int, when: str = "") -> str:
    if n == 0:
        return "Evaluation: none."
    samples = f" and {k} samples per row for pass@1 to pass@{k}" if k else ""
    return f"Evaluation{when} on at most {n:,} held-out rows: greedy decoding{samples}."


def _place(config: RunConfig) -> str:
    where = config.run_dir or f"runs/{config.kind}-<time>"
    more = ", checkpoints/" if isinstance(config, TrainConfig) else ""
    return f"Output in {where}: config.yaml, manifest.json, summary.json, metrics.jsonl, events.jsonl{more} and more."


def _rows(config: RunConfig) -> str:
    return f"task {config.task}" if config.task else str(config.data)


def _count(n: int, noun: str) -> str:
    """
    >>> _count(1, "update"), _count(2000, "update"), _count(8, "trajectory")
    ('1 update', '2,000 updates', '8 trajectories')
    """
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun[:-1]}ies" if noun.endswith("y") else f"{n:,} {noun}s"
