"""The sides of a benchmark: what is run, and the numbers that its timeline gives. The first step is left out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.launch import Timeline, launch
from benchmarks.models import Shape, save_model

PEERS = Path(__file__).parent / "peers"
NOT_OURS = ("MKL_CBWR",)
"""What the Makefile sets for our bits' sake, and costs speed: the peers run without."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run happens. `home` is shared by all runs of a benchmark, `out` is this run's own."""

    home: Path
    out: Path
    round: int
    device: str = "cpu"
    threads: int = 2
    prefix: str = ""

    def run(
        self,
        command: Sequence[str],
        diaries: Sequence[Path],
        *,
        ours: bool,
        until: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> Timeline:
        env = {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        words = [*command] if ours else ["env", *(word for name in NOT_OURS for word in ("-u", name)), *command]
        return launch(words, diaries, self.out, env=env, prefix=self.prefix, until=until)


@dataclass(slots=True)
class Run:
    """What one run gave: numbers by name, the lengths of the answers that were seen, and what it says of itself."""

    numbers: dict[str, float]
    lengths: list[int] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


Side = Callable[[Place], Run]


def ours(
    kind: str,
    words: Callable[[Place], Sequence[str]],
    *,
    model: Shape | str,
    lengths: bool = False,
    prepared: bool = False,
) -> Side:
    """`novarl <kind> <words>` as a user would run it, read from its run directory.

    `prepared`: before the first step something is computed of all rows, the reference's log-probabilities. The steps
    are then one epoch, and each holds its tokens' share of that.
    """

    def side(place: Place) -> Run:
        folder = model if isinstance(model, str) else str(save_model(model, place.home))
        run_dir = place.out / "run"
        fixed = [f"model={folder}", f"run_dir={run_dir}", f"seed={place.round}", f"device={place.device}"]
        command = [our_python(), "-m", "novarl", kind, *fixed, "save_every=null", "eval.n=1", *words(place)]
        found = place.run(command, [run_dir / "events.jsonl", run_dir / "metrics.jsonl"], ours=True)
        (begun,) = (time for time, line in found.lines if line.get("kind") == "start")
        (ready,) = (time for time, line in found.lines if line.get("kind") == "phase")
        lines = [(time, line) for time, line in found.lines if "kind" not in line]
        stages = {"generation": ("rollout",), "reward": ("reward",), "learn": ("update", "score")}
        steps = [
            {
                "time": time,
                "tokens": line.get("completion_tokens", line.get("tokens", 0.0)),
                **({"device_mb": line["memory_device_mb"]} if "memory_device_mb" in line else {}),
                **{part: sum(line.get(f"time/{name}_s", 0.0) for name in names) for part, names in stages.items()},
            }
            for time, line in lines
        ]
        seen = list(_answers(run_dir)) if lengths else []
        run = _summed(found, begun, steps, seen, {"words": [_short(word, place) for word in words(place)]})
        if prepared:
            share = run.numbers["tokens"] / sum(step["tokens"] for step in steps)
            run.numbers["reference"] = (ready - begun) * share
            run.numbers["seconds"] += run.numbers["reference"]
        return run

    return side


def _short(word: str, place: Place) -> str:
    """A word of a command without what only this machine knows."""
    return word.replace(f"{place.home}/", "").replace(f"{PEERS.parent.parent}/", "")


def _answers(run_dir: Path) -> Iterator[int]:
    """The lengths of the first step's answers."""
    for path in sorted((run_dir / "rollouts").glob("step-*.jsonl"))[:1]:
        for line in path.read_text().splitlines():
            answer = json.loads(line)
            yield len(answer["text"]) + (answer["status"] == "done")  # a byte is a token, and so is the end


def trl(what: str, settings: Callable[[Place], Mapping[str, Any]], *, model: Shape, **trainer: Any) -> Side:
    """A trainer of TRL's in its own virtualenv, as peers/run_trl.py has it."""

    def side(place: Place) -> Run:
        given = dict(settings(place))
        fixed = {"use_cpu": place.device == "cpu", "seed": place.round}
        given["trainer"] = fixed | given["trainer"] | trainer
        document = {"what": what, "model": str(save_model(model, place.home)), "out": str(place.out), **given}
        place.out.mkdir(parents=True, exist_ok=True)
        (place.out / "settings.json").write_text(json.dumps(document))
        command = [peer_python(), str(PEERS / "run_trl.py"), str(place.out / "settings.json")]
        found = place.run(command, [place.out / "steps.jsonl"], ours=False)
        (begun,) = (time for time, line in found.lines if line.get("step") == 0)
        # TRL logs a running total of tokens after each step: the answers' and the prompts' for GRPO.
        totals = [0.0, *(line["num_tokens"] for _, line in found.lines if "num_tokens" in line)]
        tokens = [after - before for before, after in pairwise(totals)]
        lines = [(time, line) for time, line in found.lines if line.get("step", 0) > 0]
        steps = []
        for index, (time, line) in enumerate(lines):
            generation, reward = line.get("generation", 0.0), line.get("reward", 0.0)
            count = sum(line["lengths"]) or (tokens[index] if index < len(tokens) else 0.0)
            steps.append({"time": time - line["paused"], "tokens": count, "generation": generation, "reward": reward})
            steps[-1] |= {"device_mb": line["device_mb"]} if "device_mb" in line else {}
        about = json.loads((place.out / "about.json").read_text())
        lengths = [length for _, line in lines for length in line["lengths"]]
        return _summed(found, begun, steps, lengths, about)

    return side


def our_python() -> str:
    """The Python of the folder that PLAIN_VENV names, with what `pip install novarl` brings and no more; else this one.

    transformers imports packages that happen to be there: what our tests need would count as our start."""
    return str(Path(os.environ["PLAIN_VENV"]) / "bin" / "python") if "PLAIN_VENV" in os.environ else sys.executable


def peer_python(name: str = "peers") -> str:
    """The Python of `.venv-<name>`, or of the folder that an environment variable (PEERS_VENV) names."""
    return str(Path(os.environ.get(f"{name.upper()}_VENV", f".venv-{name}")) / "bin" / "python")


def _summed(
    found: Timeline, begun: float, steps: list[dict[str, float]], lengths: list[int], about: dict[str, Any]
) -> Run:
    """A run's numbers: means over all steps but the first, which starts when it is over."""
    numbers = {"first_step": steps[0]["time"] - found.started}
    start = [mb for time, mb in found.memory if time <= begun]
    numbers["memory_mb"] = max(mb for _, mb in found.memory) - start[-1]
    if "device_mb" in steps[-1]:  # there, not in RAM, is what learning takes
        numbers["memory_mb"] = steps[-1]["device_mb"]
    if len(steps) > 1:
        later = steps[1:]
        whole = steps[-1]["time"] - steps[0]["time"]
        numbers["seconds"] = whole / len(later)
        numbers["tokens"] = fmean(step["tokens"] for step in later)
        parts = {name: fmean(step.get(name, 0.0) for step in later) for name in ("generation", "reward", "learn")}
        if "learn" not in later[0]:  # TRL says how long it sampled and judged; the rest it learnt
            parts["learn"] = numbers["seconds"] - parts["generation"] - parts["reward"]
        numbers |= parts
        numbers["other"] = max(0.0, numbers["seconds"] - sum(parts.values()))
        numbers["outside"] = numbers["other"] / numbers["seconds"]
        if numbers["tokens"]:
            numbers["seconds_per_token"] = numbers["seconds"] / numbers["tokens"]
            numbers["tokens_per_second"] = 1.0 / numbers["seconds_per_token"]
    settled = [(time, mb) for time, mb in found.memory if len(steps) > 400 and time >= steps[199]["time"]]
    if settled:
        numbers["mb_per_100_steps"] = _slope(settled) * numbers["seconds"] * 100
    return Run(numbers, lengths, about)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the least-squares line."""
    x, y = fmean(p[0] for p in points), fmean(p[1] for p in points)
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
