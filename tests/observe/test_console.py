"""The run as a person watches it: in a real terminal, in a pipe, with whatever a model may write."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from novarl.observe.sinks.console import ConsoleSink, _lines, can_be_live, plain_line
from novarl.observe.sinks.gauge import BLOCKS, TREND_CELLS, Gauge, Trend, clock_text, number, printable
from novarl.observe.summary import COMMAND

RECORD = {"epoch": 1.0, "total_loss": 0.9, "reward_raw_mean": 1.7, "kl_mean": 0.175, "kl": 0.5, "entropy": 1.3}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def a_pipe() -> tuple[ConsoleSink, io.StringIO]:
    stream = io.StringIO()
    return ConsoleSink(stream), stream


def test_the_promised_line() -> None:
    assert plain_line(5, RECORD) == "Epoch 1, Step 5: Loss=0.9000, Reward=1.7000, Ref KL=0.1750, Entropy=1.3000"
    assert plain_line(5, {"loss": 2.0, "tokens_per_second": 812.4}) == "Step 5: Loss=2.0000, Tokens/s=812"
    assert plain_line(1, {"kl": 0.0001, "reward_mean": -1.0}) == "Step 1: Reward=-1.0000, Update KL=0.0001"
    assert plain_line(1, {"total_loss": float("nan")}) == "Step 1: Loss=nan"


@pytest.mark.parametrize(
    ("steps", "shown"), [(5, [1, 2, 3, 4, 5]), (100, [1, *range(5, 101, 5)]), (None, [*range(1, 11), 20])]
)
def test_a_pipe_gets_some_twenty_plain_lines(steps: int | None, shown: list[int]) -> None:
    sink, stream = a_pipe()
    sink.event("phase", {"name": "rl", "steps": steps})
    for step in range(1, (steps or 25) + 1):
        sink.step(step, RECORD)
    assert [int(found) for found in re.findall(r"Step (\d+):", stream.getvalue())] == shown
    assert "\x1b" not in stream.getvalue()


def test_a_phase_ends_with_what_it_did() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = ConsoleSink(stream, clock=clock)
    sink.event("phase", {"name": "warmup", "steps": 2})
    sink.step(1, {"loss": 4.0})
    sink.step(2, {"loss": 0.5})
    clock.now += 75
    sink.event("phase", {"name": "rl", "steps": 8, "done": 6})
    sink.step(7, {"reward_mean": 0.25})
    sink.step(8, {"reward_mean": 0.75, "eval/score": 0.5})
    sink.event("eval", {"name": "after", "score": 0.5, "interval": (0.4, 0.6), "n": 500})
    sink.event("eval", {"name": "again", "score": math.nan, "interval": (math.nan, math.nan), "n": 0})
    sink.close()
    sink.close()
    assert stream.getvalue().splitlines() == [
        "Starting warm-up: 2 steps",
        "Step 1: Loss=4.0000",
        "Step 2: Loss=0.5000",
        "Warm-up: 2 steps in 1:15, loss 4 → 0.5",
        "Starting RL: 8 steps, resuming after step 6",
        "Step 7: Reward=0.2500",
        "Held-out score at step 8: 0.500",
        "Step 8: Reward=0.7500",
        "RL: 2 steps in 0:00, reward 0.25 → 0.75",
        "Held-out score after training: 0.500 [0.400, 0.600], n=500",
        "Held-out score again: unknown (no answer could be scored), n=0",
    ]


def test_updates_of_one_step_are_told_apart() -> None:
    sink, stream = a_pipe()
    sink.event("phase", {"name": "rl", "steps": 2})
    for update in range(1, 5):
        sink.step((update + 1) // 2, {"update": update, "reward_mean": 0.5})
    assert stream.getvalue().splitlines()[1:] == [
        f"Step {where}: Reward=0.5000" for where in ("1", "1, update 2", "2, update 3", "2, update 4")
    ]


def test_what_is_learnt_from_pairs_is_in_the_line() -> None:
    sink, stream = a_pipe()
    sink.event("start", {"run_dir": "runs/x", "loss": "sigmoid"})
    sink.event("phase", {"name": "dpo", "steps": 1})
    sink.step(1, {"loss": 0.5, "preference_accuracy": 0.75, "reward_margin": 0.25})
    sink.close()
    assert stream.getvalue().splitlines() == [
        "Starting training run: runs/x",
        "Loss: sigmoid",
        "Starting DPO: 1 step",
        "Step 1: Loss=0.5000, Accuracy=0.7500, Margin=0.2500",
        "DPO: 1 step in 0:00, loss 0.5 → 0.5, accuracy 0.75 → 0.75",
    ]


def test_every_sample_is_printed() -> None:
    """`log.samples_every` alone decides how many there are."""
    sink, stream = a_pipe()
    sink.event("phase", {"name": "rl", "steps": 40})
    for step in (1, 2, 10, 20, 30, 40):
        sink.event("sample", {"step": step, "prompt": f"p{step}", "text": "x", "reward": 0.5})
        sink.step(step, RECORD)
    assert re.findall(r"prompt   │ (\w+)", stream.getvalue()) == ["p1", "p2", "p10", "p20", "p30", "p40"]
    assert re.findall(r"Sample at step (\d+) \(reward 0.5\)", stream.getvalue()) == ["1", "2", "10", "20", "30", "40"]


def test_a_sample_shows_the_expected_answer() -> None:
    sink, stream = a_pipe()
    sink.event("sample", {"step": 1, "prompt": "sort: ba", "text": "ba", "answer": "ab", "reward": 0.0})
    assert stream.getvalue().splitlines()[1:] == ["  prompt   │ sort: ba", "  answer   │ ba", "  expected │ ab"]


def test_what_a_model_wrote_cannot_touch_the_terminal() -> None:
    sink, stream = a_pipe()
    sink.event("sample", {"step": 1, "prompt": "a\nb", "text": "\x1b[2J\x07\r\u202etxt\x9b" + "y" * 500})
    shown = stream.getvalue()
    assert "  prompt   │ a⏎b\n" in shown
    assert all(character.isprintable() for line in shown.splitlines() for character in line)
    assert max(map(len, shown.splitlines())) <= 80


@given(st.text(), st.integers(1, 80))
def test_printable_is_one_line_within_its_limit(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()


def test_only_the_first_failed_rollout_is_said_and_unknown_events_are_not() -> None:
    sink, stream = a_pipe()
    for _ in range(3):
        sink.event(
            "failed_rollout", {"error": 'raised ValueError: no\nTraceback ...\n  File "mine.py", line 3, in score\n'}
        )
    sink.event("save", {"path": "somewhere"})
    assert (
        stream.getvalue()
        == "Note: A rollout failed and was excluded (see events.jsonl): raised ValueError: no (mine.py, line 3)\n"
    )


def test_a_stream_that_knows_only_ascii_gets_what_it_can_show() -> None:
    raw = io.BytesIO()
    sink = ConsoleSink(io.TextIOWrapper(raw, encoding="ascii"))
    sink.event("sample", {"step": 1, "prompt": "日本", "text": "é"})
    sink.event("summary", {"after": {"score": 0.5, "n": 1}})
    assert b"prompt   ? ??" in raw.getvalue()


def test_the_live_line_needs_a_terminal_that_can_move_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    try:
        with open(follower, "w", encoding="utf-8", closefd=False) as terminal:
            monkeypatch.setenv("TERM", "xterm-256color")
            assert can_be_live(terminal)
            monkeypatch.setenv("TERM", "dumb")
            assert not can_be_live(terminal)
        with open(follower, "w", encoding="latin-1", closefd=False) as terminal:
            monkeypatch.setenv("TERM", "xterm-256color")
            assert not can_be_live(terminal)
        assert not can_be_live(io.StringIO())
    finally:
        os.close(leader)
        os.close(follower)


SCRIPT = """
import os, sys, time
from novarl.observe.sinks.console import ConsoleSink
sink = ConsoleSink()
sink.event("start", {"run_dir": "runs/x", "device": "cpu", "modules": "built-in " * 12})
sink.event("alert", {"message": "several words that do not fit in one line, /a/path/that/must/stay/in/one/piece" * 2})
sink.event("phase", {"name": "rl", "steps": 4})
for step in range(1, 5):
    said = {"prompt": "a question [bold] " * 9, "text": "an answer :smile:" * 9, "reward": 0.5}
    sink.event("sample", {"step": step, **said})
    sink.step(step, {"reward_mean": 0.2 * step, "kl": 1e-4, "entropy": 1.5, "length_mean": 9, "tokens_per_second": 4e3})
    time.sleep(0.3)
    if step == 2:
        print("the user's own print")
if sys.argv[1] == "raise":
    raise RuntimeError("planted")
sink.close()
"""


def in_a_terminal(how: str, columns: int = 80) -> tuple[str, int]:
    """What a script writes to a terminal of that width, and its exit code."""
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "PYTEST_CURRENT_TEST")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, how], stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    written = b""
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:  # Linux says so when the last writer has gone
            break
        if not chunk:
            break
        written += chunk
    os.close(leader)
    return written.decode(), process.wait()


@pytest.mark.parametrize("columns", [80, 40])
def test_in_a_terminal_the_line_lives_and_fits(columns: int) -> None:
    written, code = in_a_terminal("end", columns)
    assert code == 0, written
    shown = ESCAPES.sub("", written)
    assert "2/4" in shown
    assert "left" in shown
    assert "the user's own print" in shown
    assert "[bold]" in shown, "what a model writes is no markup"
    assert ":smile:" in shown
    notes = shown[shown.index("Device: ") : shown.index("Sample")].split()
    assert notes.count("built-in") == 12 and "one" in notes, "lines are broken between words only"
    assert "/a/path/that/must/stay/in/one/pieceseveral" in notes
    assert "RL: 4 steps in 0:01, reward 0.2 → 0.8, update KL 0.0001 → 0.0001" in " ".join(shown.split())
    live = [line for line in re.split(r"[\r\n]+", shown) if re.match(r"  (RL|reward \S+) ", line)]
    assert len(live) > 4
    assert all(len(line) <= columns for line in live), "a live line that wraps leaves rubbish behind"
    assert "…" not in "".join(live), "a reading is shown whole or not at all"
    if columns == 80:
        assert any(
            all(word in line for word in ("reward 0.8", "update KL", "entropy 1.5", "length 9", "4k tok/s"))
            for line in live
        )


@pytest.mark.parametrize("how", ["end", "raise"])
def test_the_cursor_comes_back(how: str) -> None:
    written, code = in_a_terminal(how)
    assert code == (1 if how == "raise" else 0)
    assert "\x1b[?25l" in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_time_left() -> None:
    clock = Clock()
    gauge = Gauge(clock)
    gauge.begin("rl", 110, done=10)
    assert gauge.remaining() is None
    clock.now += 20
    gauge.update(20, RECORD)
    assert gauge.remaining() == pytest.approx(180.0), "2 s a step of this process, 90 steps to go"
    clock.now += 3
    assert gauge.remaining() == pytest.approx(177.0), "it ticks while a step takes long"
    clock.now += 1000
    assert gauge.remaining() == 0.0
    gauge.begin("rl", None, done=0)
    gauge.update(1, RECORD)
    assert gauge.remaining() is None


@pytest.mark.parametrize("count", [2, 10, 11, 500])
def test_a_trend_spans_the_whole_phase_in_a_few_characters(count: int) -> None:
    trend = Trend()
    for place in range(count):
        trend.add(float(place))
    trend.add(float("nan"))
    assert 2 <= len(str(trend)) <= TREND_CELLS
    assert str(trend)[0] == BLOCKS[0]
    assert str(trend)[-1] == BLOCKS[-1]
    assert list(str(trend)) == sorted(str(trend))


def test_a_trend_gives_every_part_of_the_phase_its_share() -> None:
    trend = Trend()
    for place in range(800):
        trend.add(float(place >= 400))
    shown = str(trend)
    assert abs(shown.count(BLOCKS[0]) - shown.count(BLOCKS[-1])) <= 1
    assert len(shown) - shown.count(BLOCKS[0]) - shown.count(BLOCKS[-1]) <= 1


def test_the_reward_shown_is_that_of_all_rollouts() -> None:
    gauge = Gauge(Clock())
    gauge.update(1, {"reward_mean": 0.9, "reward_raw_mean": 0.1, "kl": 0.5, "kl_mean": 0.25})
    assert gauge.readings == {"reward": 0.1, "ref KL": 0.25}
    gauge.update(2, {"reward_mean": 0.9, "kl": 0.5})
    assert gauge.readings == {"reward": 0.9, "update KL": 0.5}
    assert plain_line(1, {"reward_mean": 0.9, "reward_raw_mean": 0.1}) == "Step 1: Reward=0.1000"


def test_a_flat_trend_is_flat() -> None:
    trend = Trend()
    trend.add(1.0)
    assert str(trend) == ""
    trend.add(1.0)
    assert str(trend) == BLOCKS[0] * 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.73412, "0.734"),
        (4123.0, "4.12k"),
        (1.2e-5, "1.2e-05"),
        (-0.0, "0"),
        (-2.5e9, "-2.5G"),
        (float("nan"), "nan"),
        (999.9, "1k"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (59.6, "1:00"), (75.0, "1:15"), (3725.0, "1:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_command_that_is_wrapped_can_still_be_pasted(width: int) -> None:
    command = "novarl rl runs/rl-20261127-025246/config.yaml run_dir=null optim.lr=0.0005 algo=grpo seed=1"
    lines = _lines(f"{COMMAND}{command}", width)
    assert len(lines) > 1 and all(line.endswith(" \\") for line in lines[:-1])
    assert subprocess.run(
        ["sh", "-c", "\n".join(["set -- \\", *lines, 'printf "%s\\n" "$@"'])],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")[:-1] == command.split(" ")
