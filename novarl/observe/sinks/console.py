"""Console output: a live progress line in a terminal, plain lines in a pipe.

      RL  ━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  8/20  0:03 left
      reward 0.734 ▁▂▄▅▇  ref KL 0.0211  entropy 1.32  length 12.1  4.12k tok/s

    Epoch 1, Step 5: Loss=0.9000, Reward=1.7000, Ref KL=0.1750, Entropy=1.3200, Length=12.1, Tokens/s=4120

`Ref KL` is the distance to the reference policy; in runs without one, `Update KL` is how far the update moved the
policy. In a pipe, a long phase prints about LINES_PER_PHASE lines, chosen by step number and not by time.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from novarl.core.errors import visible, wrapped
from novarl.observe.blame import blame
from novarl.observe.sinks.gauge import Gauge, clock_text, number, printable
from novarl.observe.summary import COMMAND, render_summary

if TYPE_CHECKING:
    from novarl.observe.sinks.screen import Screen

LINES_PER_PHASE = 20
SAMPLE_WIDTH = 64
GONE = (errno.EPIPE, errno.EIO)
"""Errors of a write whose reader is gone: a broken pipe, or a closed terminal."""
TITLES = {"warmup": "warm-up", "sft": "SFT", "dpo": "DPO", "rm": "reward model training", "rl": "RL"}
TIMES = {"before": "before training", "after": "after training"}

PLAIN = (
    ("Loss", ("total_loss", "loss"), ".4f"),
    ("Reward", ("reward_raw_mean", "reward_mean"), ".4f"),
    ("Ref KL", ("kl_mean",), ".4f"),
    ("Update KL", ("kl",), ".4f"),
    ("Accuracy", ("accuracy", "preference_accuracy", "label_accuracy"), ".4f"),
    ("Margin", ("reward_margin",), ".4f"),
    ("Entropy", ("entropy",), ".4f"),
    ("Length", ("length_mean",), ".1f"),
    ("Tokens/s", ("tokens_per_second",), ".0f"),
)


class ConsoleSink:
    """Writes to `stream`. With `live=None`, the live line is used if the stream is a terminal that can move its cursor.

    Events that are shown: `start` (`run_dir` and other fields), `phase` (`name`, `steps`, `done`), `eval` (`name`,
    `score`, `interval`, `n`), `sample` (`prompt`, `text`, `answer`, `reward`), `alert` (`message`), `failed_rollout`
    (`error`; only the first one) and `summary` (the final page). All other events are ignored.
    """

    def __init__(
        self, stream: TextIO | None = None, *, live: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.gauge = Gauge(clock)
        self.failed = 0
        self.screen: Screen | None = None
        if can_be_live(self.stream) if live is None else live:
            from novarl.observe.sinks.screen import Screen

            self.screen = Screen(self.stream, self.gauge)

    def step(self, step: int, record: Mapping[str, float]) -> None:
        self.gauge.update(step, record)
        if "eval/score" in record:
            interval = (record.get("eval/score_low", math.nan), record.get("eval/score_high", math.nan))
            self._score(f"at step {step}", record["eval/score"], interval)
        if self.screen is None and self._is_due(step):
            self._say(plain_line(step, record))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        show = {
            "start": self._start,
            "phase": self._phase,
            "eval": self._eval,
            "sample": self._sample,
            "alert": self._alert,
            "failed_rollout": self._failed_rollout,
            "summary": self._summary,
        }.get(kind)
        if show is not None:
            show(fields)

    def flush(self) -> None:
        self._write("")

    def close(self) -> None:
        self._end_phase()
        self.flush()

    def _start(self, fields: Mapping[str, Any]) -> None:
        about = ", ".join(f"{name.capitalize()}: {value}" for name, value in fields.items() if name != "run_dir")
        what = "RLHF training" if "algo" in fields else "training"
        self._say(f"Starting {what} run: {fields['run_dir']}", "bold")
        if about:
            self._say(about, "dim")

    def _phase(self, fields: Mapping[str, Any]) -> None:
        self._end_phase()
        self.gauge.begin(fields["name"], fields.get("steps"), done=fields.get("done", 0))
        title = TITLES.get(fields["name"], fields["name"])
        if self.screen is not None:
            self.screen.begin(title)
        else:
            length = f": {fields['steps']} step{'s' * (fields['steps'] != 1)}" if fields.get("steps") else ""
            again = f", resuming after step {fields['done']}" if fields.get("done") else ""
            self._say(f"Starting {title}{length}{again}")

    def _end_phase(self) -> None:
        """Remove the live line and print one permanent line that sums up the phase."""
        gauge, title = self.gauge, TITLES.get(self.gauge.name, self.gauge.name)
        if self.screen is not None:
            self.screen.end()
        if gauge.readings:
            moved = ", ".join(
                f"{k} {number(gauge.first[k])} → {number(v)}"
                for k, v in list(gauge.readings.items())[:2]
                if k in gauge.first
            )
            steps = gauge.step - gauge.start
            count = f"{steps} {'step' if steps == 1 else 'steps'}"
            self._say(f"{title[:1].upper()}{title[1:]}: {count} in {clock_text(gauge.elapsed())}, {moved}", "bold")
        gauge.begin("", None, done=0)

    def _eval(self, fields: Mapping[str, Any]) -> None:
        if self.gauge.steps is not None and self.gauge.step >= self.gauge.steps:
            self._end_phase()
        self._score(fields["name"], fields["score"], fields.get("interval"), fields.get("n"))

    def _score(self, name: str, score: float, interval: Sequence[float] | None, n: int | None = None) -> None:
        low, high = interval or (math.nan, math.nan)
        between = f" [{low:.3f}, {high:.3f}]" if math.isfinite(low + high) else ""
        rows = f", n={n}" if n is not None else ""
        found = f"{score:.3f}" if math.isfinite(score) else "unknown (no answer could be scored)"
        when = TIMES.get(name, name)
        self._say(f"Held-out score {when}: {found}{between}{rows}", "yellow")

    def _sample(self, fields: Mapping[str, Any]) -> None:
        reward = f" (reward {number(fields['reward'])})" if fields.get("reward") is not None else ""
        self._say(f"Sample at step {fields['step']}{reward}")
        for name, key in (("prompt", "prompt"), ("answer", "text"), ("expected", "answer")):
            if fields.get(key) is not None:
                self._say(f"  {name:<8} │ {printable(str(fields[key]), SAMPLE_WIDTH)}", "" if key == "text" else "dim")

    def _alert(self, fields: Mapping[str, Any]) -> None:
        self._say(f"Note: {printable(str(fields['message']), 1000)}", "yellow")

    def _failed_rollout(self, fields: Mapping[str, Any]) -> None:
        self.failed += 1
        if self.failed == 1:
            said = printable(blame(str(fields.get("error", ""))), 300)
            self._say(f"Note: A rollout failed and was excluded (see events.jsonl): {said}", "yellow")

    def _summary(self, fields: Mapping[str, Any]) -> None:
        self._end_phase()
        self._say("\n" + render_summary(fields))

    def _wrapped(self, text: str) -> str:
        """In a terminal, break long lines between words; paths stay whole, so that they can be copied."""
        if not self.stream.isatty():
            return text
        width = max(20, shutil.get_terminal_size().columns)
        return "\n".join(part for line in text.split("\n") for part in _lines(line, width))

    def _is_due(self, step: int) -> bool:
        if not self.gauge.steps:
            return step <= 10 or step % 10 == 0
        return step % max(1, self.gauge.steps // LINES_PER_PHASE) == 0 or step in (1, self.gauge.steps)

    def _say(self, text: str, style: str = "") -> None:
        text = self._wrapped(visible(text))
        if self.screen is not None:
            self.screen.say(text, style)
            return
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self._write(text.encode(encoding, "replace").decode(encoding) + "\n")

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            if error.errno not in GONE:
                raise
            leave(self.stream)


def _lines(line: str, width: int) -> list[str]:
    """A line, broken between words; a command continues with a backslash, so that it can still be pasted."""
    if not line.startswith(f"{COMMAND}novarl ") or len(line) <= width:
        return wrapped(line, width, hanging="  ")
    *parts, last = wrapped(line, width - 2, hanging=f"{COMMAND}  ")
    return [*(f"{part} \\" for part in parts), last]


def leave(stream: TextIO) -> None:
    """Redirect a stream whose reader is gone (such as `head`) to /dev/null, so that the run goes on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def plain_line(step: int, record: Mapping[str, float]) -> str:
    """One step as one line: the fields of PLAIN that the record has, in order; `Update KL` only without `Ref KL`."""
    found = (
        (label, next((name for name in names if name in record), None), form)
        for label, names, form in PLAIN
        if label != "Update KL" or "kl_mean" not in record
    )
    parts = ", ".join(f"{label}={format(record[name], form)}" for label, name, form in found if name is not None)
    epoch = f"Epoch {int(record['epoch'])}, " if "epoch" in record else ""
    update = f", update {record['update']:.0f}" if record.get("update", step) != step else ""
    return f"{epoch}Step {step}{update}: {parts}"


def can_be_live(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can move its cursor and display the characters of the live line."""
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    return stream.isatty() and encoding == "utf8" and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
