"""The workloads of `make bench`: each is data, its sides, and goals about two sides' numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.cases import Offline, Step, llama, published, sampling, sampling_floor, short_of_memory
from benchmarks.floors import Floor
from benchmarks.models import Shape
from benchmarks.reaching import ahead_floor, reaching_floor, until_good_ours, until_good_trl
from benchmarks.report import has_bf16
from benchmarks.sides import PEERS, Place, Run, Side, ours

GSM8K = {
    "question": (
        42,
        117,
        134,
        147,
        158,
        168,
        177,
        186,
        196,
        206,
        217,
        228,
        240,
        251,
        264,
        280,
        301,
        326,
        361,
        414,
        991,
    ),
    "answer": (50, 115, 135, 152, 168, 182, 197, 212, 227, 240, 257, 275, 293, 313, 336, 361, 390, 430, 481, 563, 1228),
}
HH = {
    "prompt": (29, 52, 62, 74, 90, 120, 167, 220, 263, 314, 362, 412, 467, 522, 586, 668, 767, 912, 1121, 1427, 3580),
    "chosen": (1, 20, 32, 41, 49, 58, 66, 77, 88, 101, 113, 129, 148, 169, 196, 233, 268, 315, 390, 521, 1083),
    "rejected": (3, 23, 35, 47, 60, 72, 83, 96, 111, 134, 149, 168, 193, 219, 246, 287, 322, 379, 469, 636, 2494),
}
"""Bytes of the parts of GSM8K's and hh-rlhf's (harmless) training rows at every 5th percentile."""


def sizes(
    vocabulary: int, hidden: int, inner: int, *, layers: int, heads: int, key_heads: int, head: int
) -> dict[str, int]:
    """A decoder's, as its configuration names them."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head,
    }


SMALL = Shape("small-64", ((1.0, 270.0),), {})
SMALL_TAIL = Shape("small-128", ((0.6, 12.0), (0.4, 150.0)), {})
LARGE = Shape("42m", ((1.0, 270.0),), sizes(32_768, 512, 1536, layers=8, heads=16, key_heads=8, head=32))
NINE = Shape("9m", ((0.5, 25.0), (0.5, 110.0)), sizes(512, 320, 1280, layers=6, heads=10, key_heads=5, head=32))
TINY = Shape("tiny-8", ((1.0, 8.0),), {})
HALF = Shape("half-billion", ((1.0, 270.0),), sizes(151_936, 896, 4864, layers=24, heads=14, key_heads=2, head=64))
"""494M parameters, in the sizes of Qwen 2.5's smallest."""


@dataclass(frozen=True, slots=True)
class Goal:
    """`number` of one side over that of another (of one alone where `over` is empty), and what it should be."""

    name: str
    number: str
    side: str
    over: str = ""
    at_least: float | None = None
    at_most: float | None = None
    impossible: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """`sides` are run in turn. `best` names sides of which the fastest, found out first, goes on under the name "best";
    goals speak of it so. `floors` give the least seconds of a side."""

    title: str
    sides: Mapping[str, Side]
    goals: Sequence[Goal]
    best: Sequence[str] = ()
    scout: str = "seconds"
    floors: Mapping[str, Floor] = field(default_factory=dict)
    notes: str = ""
    shown: Sequence[str] = ("seconds", "tokens_per_second", "generation", "reward", "learn", "other", "memory_mb")

    def without(self, left_out: Sequence[str], why: str) -> Workload:
        """Without some sides; goals about them cannot be shown, and say why."""
        return replace(
            self,
            sides={name: side for name, side in self.sides.items() if name not in left_out},
            goals=[
                replace(goal, impossible=why) if {goal.side, goal.over} & set(left_out) else goal for goal in self.goals
            ],
            best=[name for name in self.best if name not in left_out],
            floors={name: floor for name, floor in self.floors.items() if name not in left_out},
        )


def fast(number: str, over: str, at_least: float, name: str = "speed") -> Goal:
    """How many times the peer's time is ours."""
    return Goal(name, number, side=over, over="ours", at_least=at_least)


IN_BF16 = ("ours bf16", "trl bf16")
FP32_ONLY = "this CPU has no bf16 arithmetic: its bf16 products run at a fraction of the fp32 rate"

TRANSFORMERS = str(PEERS / "run_generate.py")
SPLITS = ("trl 8", "trl 16", "trl 64")
SHORT = (8, 16, 24)
"""Bytes of a short prompt, from the shortest to the longest."""
W1 = Step(SMALL, SHORT, 64)
WHOLE = ("micro.max_tokens=4096",)
"""Where only time counts: twice the default, all of W1's step."""
W1_IN_BF16 = {"ours bf16": W1.ours(*WHOLE, "dtype=bfloat16"), "trl bf16": W1.trl(16, bf16=True)}
W4_IN_BF16 = {"ours bf16": until_good_ours("dtype=bfloat16"), "trl bf16": until_good_trl(128, bf16=True)}
W2 = Step(SMALL_TAIL, (253, 253), 128, steps=4, peer_steps=2)
W3 = Step(LARGE, SHORT, 64, steps=3, peer_steps=2)
LEAN = ("micro.max_tokens=1024",)
"""Where memory counts: half of the default. In W2 a prompt of 256 tokens and its 8 answers are still learnt together,
and the prompt once; in W3 two prompts with theirs."""
SFT = Offline("sft", SMALL, GSM8K, batch=16, lr=1e-5)
TIGHT = Offline("sft", TINY, GSM8K, batch=16, lr=1e-5)
DPO = Offline("dpo", SMALL, HH, batch=8, lr=1e-6)
ON_GPU = ("dtype=bfloat16", "micro.max_tokens=16384")
FORMS = (("", "", ()), ("-compiled", ", compile=true", ("compile=true",)))
"""Of what is for GPUs: the end of its name, of its title, and what is set."""
G1 = Offline("sft", HALF, GSM8K, batch=64, lr=1e-5, steps=10)
G2 = Step(HALF, (253, 253), 256, prompts=16, steps=4, peer_steps=3)
START = Step(TINY, SHORT, 8, steps=1, peer_steps=1)
SINKS = Step(SMALL, SHORT, 64, steps=9)
GROWTH = {
    prompts: Step(SMALL, SHORT, 32, prompts=prompts, steps=steps) for prompts, steps in ((8, 6), (32, 5), (128, 3))
}
MANY = Step(SMALL, SHORT, 32, prompts=512, steps=2)
LONG = Step(TINY, SHORT, 8, prompts=2, samples=4, steps=2000)
QUIET = ("log.console=false", "log.tensorboard=false", "log.rollouts_every=null", "log.samples_every=null")
LOUD = ("log.rollouts_every=1", "log.samples_every=1")


def start_through_transformers(place: Place) -> Run:
    return ours("rl", START.words, model=llama(TINY, place))(place)


def published_as(*kind: str) -> Side:
    def words(place: Place) -> list[str]:
        return [*W1.words(place), *WHOLE]

    return lambda place: ours("rl", words, model=published(SMALL, place, *kind), lengths=True)(place)


WORKLOADS: dict[str, Workload] = {
    "W1": Workload(
        "GRPO, 6M parameters, 8 prompts with 8 answers, short prompts, at most 64 tokens",
        W1.sides(*WHOLE) | W1_IN_BF16,
        [
            fast("seconds", "best", 1.5),
            fast("seconds", "best", 1.7, "speed (stretch)"),
            Goal("speed in bf16", "seconds", "best", "ours bf16", at_least=1.8),
            Goal("speed in bf16, TRL's too", "seconds", "trl bf16", "ours bf16", at_least=1.8),
        ],
        best=SPLITS,
        floors={"ours": W1.floor, "ours bf16": W1.floor_in_bf16},
        notes="A run of TRL's in bf16 has a split of 16; the speed in bf16 is over the best of its runs in fp32. "
        "Ours have micro.max_tokens=4096: with the default of 2,048 they take less memory and more time.",
    ),
    "W2": Workload(
        "GRPO, 6M parameters, prompts of 256 tokens, 8 with 8 answers, heavy-tailed lengths of at most 128",
        W2.sides(*LEAN),
        [
            fast("seconds", "trl 64", 4.5, "speed, TRL's default split"),
            fast("seconds", "best", 3.5, "speed, TRL's best split"),
            Goal("memory, TRL's default split", "memory_mb", "ours", "trl 64", at_most=1 / 6),
            Goal("memory, TRL's best split", "memory_mb", "ours", "best", at_most=1 / 2),
        ],
        best=SPLITS,
        floors={"ours": W2.floor},
        notes="TRL's default split: a batch of 64 without accumulation, which TRL leaves out unless it is set. "
        "Ours has micro.max_tokens=1024: with the default of 2,048 it takes more memory.",
    ),
    "W3": Workload(
        "GRPO, 42M parameters, vocabulary 32,768",
        W3.sides(*LEAN),
        [
            fast("seconds", "best", 2.5),
            Goal("memory, TRL's default split", "memory_mb", "ours", "trl 64", at_most=1 / 3),
            Goal("memory, TRL's best split", "memory_mb", "ours", "best", at_most=1 / 3),
            Goal("memory, TRL's split of 8, the least", "memory_mb", "ours", "trl 8", at_most=1 / 3),
        ],
        best=SPLITS,
        floors={"ours": W3.floor},
        notes="Gradients and AdamW's two moments alone are 12 bytes a parameter, 504 MB. "
        "Ours has micro.max_tokens=1024: with the default of 2,048 it takes more memory and less time.",
    ),
    "W4": Workload(
        "`task=sort` from one SFT checkpoint to 90 % greedy on 500 held-out rows: time from process start",
        {
            "ours": until_good_ours(),
            "trl 16": until_good_trl(16),
            "trl 64": until_good_trl(64),
            "trl 128": until_good_trl(128),
        }
        | W4_IN_BF16,
        [
            Goal("time to 90 %", "seconds", "ours", "best", at_most=1 / 3),
            Goal("time to 90 %, both in bf16", "seconds", "ours bf16", "trl bf16", at_most=1 / 3),
        ],
        best=("trl 16", "trl 64", "trl 128"),
        floors={"ours": reaching_floor},
        shown=("seconds", "steps", "start", "step_seconds"),
        notes="Each side has the learning rate with which it needs the fewest steps (rates.md): 7e-4 for us, 1e-3 for "
        "TRL. A run of TRL's in bf16 has a split of 128. The floor counts once what answers to one prompt begin with.",
    ),
    "W5": Workload(
        "SFT, GSM8K's lengths, 16 rows a step",
        {
            "ours": SFT.ours(),
            "trl 8": SFT.trl(8),
            "trl 16": SFT.trl(16),
            "packed 1": SFT.trl(1, packs=4),
            "packed 4": SFT.trl(4, packs=4),
        },
        [
            fast("seconds_per_token", "best", 2.0, "speed, padded"),
            fast("seconds_per_token", "packed 4", 5.0, "speed, packed, 4 packs a batch"),
            fast("seconds_per_token", "packed 1", 5.0, "speed, packed, TRL's best split"),
        ],
        best=("trl 8", "trl 16"),
        floors={"ours": SFT.floor},
        shown=("seconds", "tokens_per_second", "memory_mb"),
        notes="TRL lays the packs of a batch out as one row under a dense mask, so a batch of 4 packs (its default: 8) "
        "costs more a token than one pack at a time, which only accumulation gives.",
    ),
    "W6": Workload(
        "DPO, hh's lengths, 8 pairs a step",
        {"ours": DPO.ours(), "trl 1": DPO.trl(1), "trl 2": DPO.trl(2), "trl 8": DPO.trl(8)},
        [fast("seconds", "best", 2.5), fast("seconds", "trl 8", 2.5, "speed, TRL's default split")],
        best=("trl 1", "trl 2", "trl 8"),
        floors={"ours": DPO.floor},
        shown=("seconds", "reference", "memory_mb"),
        notes="We compute the reference's log-probabilities of all rows once, before the first step; the run is one "
        "epoch: a step's seconds hold what its tokens took of that (reference). TRL computes them in each step, its "
        "default.",
    ),
    "W7": Workload(
        "Sampling 256 requests, 9M parameters, prompts of 8 to 128 tokens, heavy-tailed answers of at most 166",
        {
            "ours": sampling(NINE, 166, "-m", "benchmarks.sample"),
            "generate 64": sampling(NINE, 166, TRANSFORMERS, venv="peers", kind="generate", batch=64),
            "generate 256": sampling(NINE, 166, TRANSFORMERS, venv="peers", kind="generate", batch=256),
            "continuous": sampling(NINE, 166, TRANSFORMERS, venv="peers", kind="continuous"),
            "vllm": sampling(NINE, 166, str(PEERS / "run_vllm.py"), venv="vllm"),
        },
        [
            Goal("speed, generate", "tokens_per_second", "ours", "best", at_least=3.0),
            Goal("speed, continuous batching", "tokens_per_second", "ours", "continuous", at_least=1.0),
            Goal("speed, vLLM", "tokens_per_second", "ours", "vllm", at_least=1.0),
        ],
        best=("generate 64", "generate 256"),
        floors={"ours": partial(sampling_floor, NINE)},
        shown=("tokens_per_second", "seconds", "tokens"),
    ),
    "W8": Workload(
        "The learner, 42M parameters: share of the measured rate of matrix products",
        {"ours": W3.ours()},
        [Goal("share of the GEMM rate", "learn_share", "ours", at_least=0.8)],
        floors={"ours": W3.floor},
        notes="W3's step with the default of micro.max_tokens; W3's own, with 1,024, takes less memory.",
    ),
    "W9": Workload(
        "Command to first optimiser step, tiny model",
        {
            "ours": start_through_transformers,
            "built-in": START.ours(),
            "trl": START.trl(64),
        },
        [
            Goal("start, model through transformers", "first_step", "ours", "trl", at_most=0.85),
            Goal("start, built-in model", "first_step", "built-in", "trl", at_most=0.5),
        ],
        floors={
            "ours": lambda home, runs, rates: {"first_step": rates.transformers},
            "built-in": lambda home, runs, rates: {"first_step": rates.torch},
        },
        shown=("first_step",),
        notes="TRL trains the built-in model's folder; the Llama that we load through transformers is its size.",
    ),
    "sinks": Workload(
        "Console, JSONL, TensorBoard and the rollout log of every step, on W1's step",
        {"ours": SINKS.ours(*LOUD), "quiet": SINKS.ours(*QUIET)},
        [
            Goal("time outside the stages, sinks and all", "outside", "ours", at_most=0.02),
            Goal("step time with sinks over without", "seconds", "ours", "quiet", at_most=1.02),
        ],
        notes="Both draw the same answers in a round. The time outside the stages bounds the sinks' share from above.",
    ),
    "overlap": Workload(
        "A reward that takes 50 ms a row, on W1's step; and W4 with sampling one step ahead of learning",
        {
            "ours": SINKS.ours(reward="slow"),
            "fast": SINKS.ours(),
            "ahead": until_good_ours("rollout.staleness=1"),
            "in turn": until_good_ours("threads=1"),
            "two threads": until_good_ours(),
        },
        [
            Goal("step time over that of a fast reward", "seconds", "ours", "fast", at_most=1.1),
            Goal("time to 90 %, one step ahead over in turn", "seconds", "ahead", "in turn", at_most=0.8),
            Goal("step time, one step ahead over in turn", "step_seconds", "ahead", "in turn", at_most=0.8),
        ],
        floors={"ahead": ahead_floor},
        shown=("seconds", "generation", "reward", "learn", "steps", "start", "step_seconds"),
        notes="Ahead, two processes have a thread each; in turn, one process has one, and a core is free. The slow "
        "reward has nine steps, since its worker processes start in the first two, of which the second counts.",
    ),
    "families": Workload(
        "W1's step on a model that is loaded through transformers",
        {
            "ours": published_as(),
            "built-in": W1.ours(*WHOLE),
            "left": published_as("biases"),
            "trl 16": W1.trl(16),
        },
        [
            fast("seconds", "trl 16", 1.5, "speed of an adopted model"),
            Goal("step time, adopted over built-in", "seconds", "ours", "built-in", at_most=1.05),
            Goal("speed of a model that is left to transformers", "seconds", "trl 16", "left", at_least=1.0),
        ],
        floors={"ours": W1.floor},
        notes="One model in three forms: a Qwen 3 that is published as others are, which our decoder adopts; the same "
        "in the folder of a built-in model; and with biases, all 0, whose modules stay transformers' own.",
    ),
    "growth": Workload(
        "16 times the prompts a step (6M parameters, at most 32 tokens); and 2,000 steps (tiny model)",
        {
            "ours": MANY.ours(*QUIET),
            **{f"{prompts} prompts": step.ours(*QUIET) for prompts, step in GROWTH.items()},
            "long": LONG.ours(*QUIET),
            "long in bf16": LONG.ours(*QUIET, "dtype=bfloat16"),
        },
        [
            Goal("tokens/s at 512 prompts over 32", "tokens_per_second", "ours", "32 prompts", at_least=0.9),
            Goal("tokens/s at 512 prompts over 32 (not above)", "tokens_per_second", "ours", "32 prompts", at_most=1.1),
            Goal("tokens/s at 128 prompts over 8", "tokens_per_second", "128 prompts", "8 prompts", at_least=0.9),
            Goal("MB per 100 steps after step 200", "mb_per_100_steps", "long", at_most=1.0),
            Goal("MB per 100 steps after step 200, in bf16", "mb_per_100_steps", "long in bf16", at_most=1.0),
        ],
        shown=("seconds", "tokens_per_second", "memory_mb", "mb_per_100_steps"),
        notes="Ours is 512 prompts a step. From 32 prompts on there are the 256 answers that are sampled side by side; "
        "with fewer, products have fewer rows, which is no cost of growth.",
    ),
    "memory": Workload(
        "Memory that runs out (RLIMIT_AS) in each micro-batch of an SFT step, forward and backward (tiny model)",
        {"ours": short_of_memory(TIGHT)},
        [
            Goal("gradient's relative error, the worst", "error", "ours", at_most=1e-6),
            Goal("share of micro-batches that failed in both passes", "failed", "ours", at_least=1.0),
            Goal("share of steps that ended", "ended", "ours", at_least=1.0),
            Goal("share of runs whose events tell it once", "told", "ours", at_least=1.0),
            Goal("one clear error after ten in a row", "clear", "ours", at_least=1.0),
        ],
        shown=("injections", "failed", "ended", "told", "clear"),
        notes="Real allocations fail. `failed` counts the injections after which the pass began again; the error is "
        "that of the whole gradient, |found - undisturbed| / |undisturbed|, in float32.",
    ),
    **{
        f"G1{name}": Workload(
            f"SFT, 494M parameters, GSM8K's lengths, 64 rows a step, in bf16{said}: MFU",
            {"ours": G1.ours(*ON_GPU, *extra)},
            [Goal("share of the GPU's peak", "seconds_share", "ours", at_least=0.4)],
            floors={"ours": G1.at_peak},
            shown=("seconds", "tokens_per_second", "memory_mb"),
            notes="FLOPs by the formula in `benchmarks/floors.py`, which counts the head for answers alone.",
        )
        for name, said, extra in FORMS
    },
    **{
        f"G2{name}": Workload(
            f"GRPO, 494M parameters, prompts of 256 tokens, 16 with 8 answers of at most 256, in bf16{said}",
            {
                "ours": G2.ours(*ON_GPU, *extra),
                **{f"trl {split}": G2.trl(split, bf16=True) for split in (16, 64, 128)},
            },
            [fast("seconds", "best", 2.0)],
            best=("trl 16", "trl 64", "trl 128"),
            notes="Both keep their weights in float32 and compute in bf16. TRL samples by `generate`.",
        )
        for name, said, extra in FORMS
    },
}

FOR_CPUS = ("memory",)
FOR_GPUS = tuple(name for name in WORKLOADS if name.startswith("G"))
VLLM_OF_CPUS = "the vLLM that is installed here is for CPUs"


def on(device: str) -> dict[str, Workload]:
    """The workloads that `device` can show, each without the sides that it cannot."""
    if device != "cpu":
        found = {name: workload for name, workload in WORKLOADS.items() if name not in FOR_CPUS}
        return found | {"W7": found["W7"].without(("vllm",), VLLM_OF_CPUS)}
    found = {name: workload for name, workload in WORKLOADS.items() if name not in FOR_GPUS}
    return found if has_bf16() else {name: workload.without(IN_BF16, FP32_ONLY) for name, workload in found.items()}
