"""The tool of examples/calculator.py: a model that has seen how it is called calls it, and its answer counts."""

from __future__ import annotations

from pathlib import Path

from tests.compose.harness import QUIET, finished, metrics, summary, write_rows
from tests.examples.test_examples import ROOT, load_module

EXAMPLE = ROOT / "examples" / "calculator.py"


def test_what_the_tool_says() -> None:
    module = load_module(EXAMPLE)

    def said(text: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] = module.interact([{"role": "assistant", "content": text}])
        return found

    assert said("first calc(17 + 25), then calc(1*1)") == [{"role": "tool", "content": "42"}]
    assert said("calc(-3*4)") == [{"role": "tool", "content": "-12"}]
    assert said("42") == said("calc(9 ** 9)") == []


def test_a_model_learns_to_call_it(tmp_path: Path) -> None:
    sums = [(left, right) for left in range(2, 6) for right in range(2, 6)] * 2

    def asked(left: int, right: int) -> str:
        return f"{left} hens, {right} more"

    def talk(left: int, right: int) -> dict[str, object]:
        turns = [("user", asked(left, right)), ("assistant", f"calc({left}+{right})")]
        turns += [(role, str(left + right)) for role in ("tool", "assistant")]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    talks = write_rows(tmp_path / "talks.jsonl", (talk(*pair) for pair in sums))
    data = write_rows(tmp_path / "sums.jsonl", ({"prompt": asked(*pair), "answer": str(sum(pair))} for pair in sums))
    sft = tmp_path / "sft"
    finished("sft", "model=tiny", f"data={talks}", "steps=70", "batch_size=16", *QUIET, f"run_dir={sft}")
    tool = (f"data={data}", f"rollout.env_path={EXAMPLE}", "rollout.max_turns=2", "rollout.max_tokens=16")
    trained = f"model={sft}/checkpoints/latest/model"
    finished("eval", trained, *tool, "eval.n=8", f"run_dir={tmp_path / 'eval'}")
    assert summary(tmp_path / "eval")["after"]["score"] == 1.0
    shown = (tmp_path / "eval" / "samples.md").read_text()
    assert "assistant:\n\n```\ncalc(2+2)\n```\n\ntool:\n\n```\n4\n```\n\nassistant:\n\n```\n4\n```" in shown

    more = ("steps=1", "prompts_per_rollout=4", "responses_per_prompt=2", "eval.n=2")
    finished("rl", trained, *tool, *more, *QUIET, f"run_dir={tmp_path / 'rl'}")
    (row,) = metrics(tmp_path / "rl")
    assert row["turns_mean"] > 1.5 and row["reward_mean"] > 0.5
    finished("eval", "model=tiny", *tool, "eval.n=8", f"run_dir={tmp_path / 'untrained'}")
    assert summary(tmp_path / "untrained")["after"]["score"] == 0.0
