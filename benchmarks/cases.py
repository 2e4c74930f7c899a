"""What the workloads are made of: rows of a length law, and each kind of run on them, ours and the peer's."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.floors import Rates, Size, floor_seconds, grouped
from benchmarks.models import Shape, save_model
from benchmarks.sides import PEERS, Place, Run, Side, our_python, ours, peer_python, trl
from novarl.core.seeds import derive
from novarl.data.stream import Stream

REQUEST = (8, 32, 64, 128)
"""Bytes of the prompts of requests, from the shortest to the longest."""
EPOCH = 8
"""Steps that the prompts of a workload make."""
THRESHOLD = 1 << 16
"""Bytes from which glibc maps an allocation for itself, so that a limit of the address space meets it: what is freed
below that is kept for the next, where no limit reaches."""
TEMPLATE = 3
"""Tokens that the chat template adds to a prompt: who speaks, its end, who speaks next. An answer's end is its own."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Made-up data of a length law: `count` rows of printable text, `parts` named in order, bytes from quantiles."""

    name: str
    count: int
    parts: Mapping[str, Sequence[int]]

    def draw(self) -> list[dict[str, str]]:
        rng = random.Random(self.name)
        return [{name: _text(rng, law) for name, law in self.parts.items()} for _ in range(self.count)]


def _text(rng: random.Random, quantiles: Sequence[int]) -> str:
    place = rng.random() * (len(quantiles) - 1)
    low = int(place)
    high = min(low + 1, len(quantiles) - 1)
    length = round(quantiles[low] + (quantiles[high] - quantiles[low]) * (place - low))
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz     ", k=max(1, length)))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], order: str | None = None, *, seed: int = 0) -> Path:
    """A JSONL file; in the order in which our loop of that stream and seed takes the rows, where `order` names one."""
    indices: Sequence[int] = range(len(rows))
    if order is not None:
        indices = [index for _, index in Stream(len(rows), derive(seed, order)).take(len(rows))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(rows[index]) + "\n" for index in indices))
    return path


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


@dataclass(frozen=True, slots=True)
class Step:
    """A GRPO step: `prompts` of `prompt_bytes` (quantiles), `samples` answers each of at most `longest` tokens."""

    model: Shape
    prompt_bytes: tuple[int, ...]
    longest: int
    prompts: int = 8
    samples: int = 8
    steps: int = 5
    peer_steps: int = 5

    def files(self, place: Place) -> tuple[Path, Path]:
        """The same prompts for us and for TRL, there in the order in which our loop takes them."""
        drawn = Rows(f"prompts-{self.model.name}", EPOCH * self.prompts, {"text": self.prompt_bytes}).draw()
        mine = [{"messages": said("user", row["text"]), "answer": ""} for row in drawn]
        theirs = [{"prompt": said("user", row["text"])} for row in drawn]
        stem = f"prompts/{self.model.name}-{self.prompts}"
        return (
            write_rows(place.home / f"{stem}.jsonl", mine),
            write_rows(place.home / f"{stem}-trl-{place.round}.jsonl", theirs, order="prompts", seed=place.round),
        )

    def words(self, place: Place, reward: str = "checksum") -> list[str]:
        data, _ = self.files(place)
        return [
            f"data={data}",
            f"eval.data={data}",
            "algo=grpo",
            "kl.coef=0",
            f"reward={PEERS / 'reward.py'}:{reward}",
            f"steps={self.steps}",
            f"prompts_per_rollout={self.prompts}",
            f"responses_per_prompt={self.samples}",
            f"rollout.max_tokens={self.longest}",
            "optim.lr=1e-6",
        ]

    def ours(self, *extra: str, reward: str = "checksum") -> Side:
        return ours("rl", lambda place: [*self.words(place, reward), *extra], model=self.model, lengths=True)

    def trl(self, per_device: int, **trainer: Any) -> Side:
        def settings(place: Place) -> dict[str, Any]:
            rows = self.prompts * self.samples
            return {
                "data": str(self.files(place)[1]),
                "reward": "checksum",
                "trainer": {
                    "per_device_train_batch_size": per_device,
                    "gradient_accumulation_steps": rows // per_device,
                    "num_generations": self.samples,
                    "max_completion_length": self.longest,
                    "max_steps": self.peer_steps,
                    "learning_rate": 1e-6,
                    "loss_type": "grpo",
                    "beta": 0.0,
                    "shuffle_dataset": False,
                },
            }

        return trl("grpo", settings, model=self.model, **trainer)

    def floor(self, home: Path, runs: Mapping[str, Run], rates: Rates) -> dict[str, float]:
        """The least seconds of a step whose answers are as long as ours were."""
        run = runs["ours"]
        scale = run.numbers["tokens"] / sum(run.lengths)
        prompt = round(fmean(self.prompt_bytes)) + TEMPLATE
        answers = [length * scale for length in run.lengths]
        return floor_seconds(Size.of(save_model(self.model, home)), rates, prompt, self.prompts, answers)

    def floor_in_bf16(self, home: Path, runs: Mapping[str, Run], rates: Rates) -> dict[str, float]:
        """The same, were every product in bf16 (the head's is not), whose weights have half the bytes to read."""
        halved = replace(
            rates, train_fp32=rates.train_bf16, decode_fp32=rates.decode_bf16, bandwidth=2 * rates.bandwidth
        )
        return self.floor(home, {"ours": runs["ours bf16"]}, halved)

    def sides(self, *extra: str) -> dict[str, Side]:
        """We, with `extra` settings, and TRL with each way to split its batch."""
        return {"ours": self.ours(*extra), "trl 8": self.trl(8), "trl 16": self.trl(16), "trl 64": self.trl(64)}


@dataclass(frozen=True, slots=True)
class Offline:
    """Supervised steps (`kind` sft, rows of question and answer) or preference steps (dpo) on rows of a length law."""

    kind: str
    model: Shape
    law: Mapping[str, Sequence[int]]
    batch: int
    lr: float
    steps: int = 4

    def draw(self) -> list[dict[str, str]]:
        """As many rows as the steps learn from: one epoch."""
        return Rows(self.kind, self.steps * self.batch, self.law).draw()

    def files(self, place: Place) -> tuple[Path, Path]:
        """The same rows for us and for TRL, there in the order in which our loop takes them."""
        drawn = self.draw()
        if self.kind == "sft":
            asked = [(said("user", row["question"]), said("assistant", row["answer"])) for row in drawn]
            mine: list[dict[str, Any]] = [{"messages": question + answer} for question, answer in asked]
            theirs: list[dict[str, Any]] = [{"prompt": question, "completion": answer} for question, answer in asked]
        else:
            mine = theirs = [
                {name: said("user" if name == "prompt" else "assistant", text) for name, text in row.items()}
                for row in drawn
            ]
        return (
            write_rows(place.home / self.kind / "rows.jsonl", mine),
            write_rows(place.home / self.kind / f"trl-{place.round}.jsonl", theirs, order="rows", seed=place.round),
        )

    def ours(self, *extra: str) -> Side:
        def words(place: Place) -> list[str]:
            data, _ = self.files(place)
            return [
                f"data={data}",
                f"eval.data={data}",
                f"batch_size={self.batch}",
                f"steps={self.steps}",
                f"optim.lr={self.lr}",
                *extra,
            ]

        return ours(self.kind, words, model=self.model, prepared=self.kind == "dpo")

    def at_peak(self, home: Path, runs: Mapping[str, Run], rates: Rates) -> dict[str, float]:
        """The seconds of a step at the peak rate of bf16: their share is what is known as MFU."""
        return {"seconds": self.floor(home, runs, replace(rates, train_fp32=rates.peak_bf16))["seconds"]}

    def floor(self, home: Path, runs: Mapping[str, Run], rates: Rates) -> dict[str, float]:
        """The least seconds of a step of rows as long as they are on average; a pair's prompt is counted once."""
        size, flops = Size.of(save_model(self.model, home)), 0.0
        drawn = self.draw()
        for row in drawn:
            prompt, *answers = (len(row[name]) for name in self.law)  # the prompt is named first
            flops += grouped(size, prompt + TEMPLATE, 1, [answer + 1 for answer in answers])[2]
        if self.kind == "dpo":
            flops *= 4 / 3  # the reference's forward pass
        seconds = flops / len(drawn) * self.batch / rates.train_fp32 / 1e9
        return {"seconds": seconds, "learn": seconds}

    def trl(self, per_device: int, *, packs: int = 0) -> Side:
        """With `packs`, so many packs of 2,048 tokens a step instead of rows."""

        def settings(place: Place) -> dict[str, Any]:
            trainer = {
                "per_device_train_batch_size": per_device,
                "gradient_accumulation_steps": (packs or self.batch) // per_device,
                "max_length": 2048 if packs else None,
                "max_steps": self.steps,
                "learning_rate": self.lr,
                "train_sampling_strategy": "sequential",
            }
            packing = {"packing": True} if packs else {}
            return {"data": str(self.files(place)[1]), "trainer": trainer | packing}

        return trl(self.kind, settings, model=self.model)


def sampling(model: Shape, longest: int, *script: str, venv: str = "", count: int = 256, **settings: Any) -> Side:
    """`count` requests with prompts of 8 to 128 bytes, by a script of `.venv-<venv>` or of ours."""

    def side(place: Place) -> Run:
        prompts = [row["text"] for row in Rows("requests", count, {"text": REQUEST}).draw()]
        place.out.mkdir(parents=True, exist_ok=True)
        asked = {
            "model": str(save_model(model, place.home)),
            "prompts": prompts,
            "longest": longest,
            "seed": place.round,
            "device": place.device,
            **settings,
        }
        given, found = place.out / "requests.json", place.out / "found.jsonl"
        given.write_text(json.dumps(asked))
        python = peer_python(venv) if venv else our_python()
        seen = place.run([python, *script, str(given), str(found)], [found], ours=not venv)
        ((_, line),) = seen.lines
        lengths, seconds = line["lengths"], line["seconds"]
        numbers = {"seconds": seconds, "tokens": float(sum(lengths)), "tokens_per_second": sum(lengths) / seconds}
        return Run(numbers, lengths, {"version": line["version"], "settings": settings})

    return side


def short_of_memory(case: Offline) -> Side:
    """Supervised steps on one batch of `case`, each of which runs out of memory once, and some that always do."""

    def side(place: Place) -> Run:
        data, _ = case.files(place)
        model = save_model(case.model, place.home)
        place.out.mkdir(parents=True, exist_ok=True)
        words = [f"model={model}", f"data={data}", f"eval.data={data}", "eval.n=1", f"seed={place.round}", "steps=1"]
        words += [f"batch_size={case.batch}", f"optim.lr={case.lr}", "save_every=null"]
        given, found = place.out / "given.json", place.out / "found.jsonl"
        given.write_text(json.dumps({"words": words, "out": str(place.out)}))
        command = [sys.executable, "-m", "benchmarks.memory", str(given), str(found)]
        seen = place.run(["env", f"MALLOC_MMAP_THRESHOLD_={THRESHOLD}", *command], [found], ours=True)
        ((_, line),) = seen.lines
        injections = line["injections"]
        numbers = {name: fmean(one[name] for one in injections) for name in ("failed", "ended", "told")}
        numbers |= {"error": max(one["error"] for one in injections), "injections": float(len(injections))}
        numbers["clear"] = fmean(found["clear"] for found in line["ten"].values())
        return Run(numbers, [], {"version": line["version"], "said": line["ten"]["forward"]["said"]})

    return side


def sampling_floor(model: Shape, home: Path, runs: Mapping[str, Run], rates: Rates) -> dict[str, float]:
    """The least seconds in which requests of a mean prompt could have got our answers."""
    run = runs["ours"]
    size, prompt = Size.of(save_model(model, home)), round(fmean(REQUEST)) + TEMPLATE
    found = floor_seconds(size, rates, prompt, len(run.lengths), run.lengths)
    return {"seconds": found["generation"]}


def llama(tokenizer: Shape, place: Place) -> str:
    """A tiny Llama of random weights, which we load through transformers; made once, by the peer's Python."""
    folder = place.home / "tiny-llama"
    if not (folder / "config.json").exists():
        words = [peer_python(), str(PEERS / "make_llama.py"), str(save_model(tokenizer, place.home)), str(folder)]
        subprocess.run(words, check=True)
    return str(folder)


def published(shape: Shape, place: Place, *kind: str) -> str:
    """The workload's model as others publish theirs, which we load through transformers; made once."""
    folder = place.home / "-".join((shape.name, "published", *kind))
    if not (folder / "config.json").exists():
        words = [peer_python(), str(PEERS / "make_family.py"), str(save_model(shape, place.home)), str(folder), *kind]
        subprocess.run(words, check=True)
    return str(folder)
