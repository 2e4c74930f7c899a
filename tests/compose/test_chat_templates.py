"""Runs on models whose chat template and eos token disagree, or whose template is given more than messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from novarl.compose import chat
from novarl.config.load import load as read_config
from novarl.config.tree import SFTConfig
from novarl.data.dataset import load_rl, load_sft
from novarl.data.pairs import Reading, load_pairs
from novarl.models.load import load
from novarl.observe.sinks.jsonl import read_lines
from tests.compose.harness import QUIET, finished, novarl

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
QUESTION = [{"role": "user", "content": "hi"}]
ANSWER = [{"role": "assistant", "content": "no"}]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model of Qwen2.5's kind: bytes, ChatML, and an eos that the template never writes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", chat_template=CHATML)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    config = Qwen3Config(vocab_size=264, eos_token_id=tokenizer.eos_token_id, **sizes, **heads)
    for part in (Qwen3ForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_end_of_a_turn_is_a_stop_token_and_is_saved(base: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", *({"messages": QUESTION + ANSWER} for _ in range(20)))
    run = tmp_path / "run"
    finished("sft", f"model={base}", f"data={rows}", "steps=1", "batch_size=2", "eval.n=2", f"run_dir={run}", *QUIET)
    model = run / "checkpoints" / "latest" / "model"
    tokenizer = load(str(model)).tokenizer
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]
    assert end in json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    assert load(str(model)).eos_ids == (tokenizer.eos_token_id, end)
    (sequence,), _ = load_sft([_raw({"messages": QUESTION + ANSWER})], tokenizer=tokenizer, max_length=99)
    assert sequence.tokens[-1] == end and sequence.mask[-1]


def _raw(value: dict[str, Any]) -> Any:
    from novarl.data.sources import RawRow

    return RawRow(0, "rows.jsonl:1", value)


@pytest.mark.parametrize("as_json", [False, True])
def test_tools_and_kwargs_of_a_row_reach_the_template(base: Path, as_json: bool) -> None:
    tokenizer = load(str(base)).tokenizer
    given: dict[str, Any] = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    if as_json:
        given = {name: json.dumps(value) for name, value in given.items()}
    (prompt,), _ = load_rl([_raw({"prompt": QUESTION, **given})], tokenizer=tokenizer, max_length=999)
    (learnt,), _ = load_sft([_raw({"messages": QUESTION + ANSWER, **given})], tokenizer=tokenizer, max_length=999)
    pair = {"prompt": QUESTION, "chosen": ANSWER, "rejected": [{"role": "assistant", "content": "yes"}], **given}
    (better,), _ = load_pairs([_raw(pair)], Reading(tokenizer, 999))
    text = tokenizer.decode(prompt.tokens)
    assert '"name": "look_up"' in text and text.endswith("assistant\n<think>\n\n</think>\n\n")
    assert prompt.template_kwargs == {"enable_thinking": False, "tools": [TOOL]}
    for sequence in (learnt, better.chosen, better.rejected):
        assert sequence.tokens[: sequence.mask.index(True)] == prompt.tokens
    assert tokenizer.decode(learnt.tokens) == text + "no<|im_end|>"


def test_the_keys_of_a_run_reach_the_template_and_rows_take_precedence(base: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([TOOL]))
    rows = write(
        tmp_path / "rows.jsonl",
        {"messages": QUESTION + ANSWER, "tools": [TOOL | {"note": "of the row"}]},
        *({"messages": QUESTION + ANSWER} for _ in range(3)),
    )
    keys = (f"tools={tools}", "chat_template_kwargs.enable_thinking=false", f"run_dir={tmp_path / 'run'}", *QUIET)
    finished("sft", f"model={base}", f"data={rows}", "steps=1", "batch_size=2", "eval.n=2", *keys)
    shown = (tmp_path / "run" / "samples.md").read_text()
    assert shown.count("look_up") == 4 and shown.count("of the row") == 1
    config = read_config(SFTConfig, overrides=[f"model={base}", f"data={rows}", *keys[:2]])
    policy = chat.with_chat(load(str(base)), config)
    assert policy.template_kwargs == {"enable_thinking": False, "tools": [TOOL]}
    (first, second, *_), _ = load_sft(
        rows, tokenizer=policy.tokenizer, max_length=999, template_kwargs=policy.template_kwargs
    )
    for sequence in (first, second):
        assert policy.tokenizer.decode(sequence.tokens).endswith("assistant\n<think>\n\n</think>\n\nno<|im_end|>")


def test_a_template_that_writes_the_date_goes_on_with_that_of_the_start(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Day(chat.datetime.date):
        now = (2026, 3, 5)

        @classmethod
        def today(cls) -> Day:
            return cls(*cls.now)

    monkeypatch.setattr(chat.datetime, "date", Day)
    rows = write(tmp_path / "rows.jsonl", *({"messages": QUESTION + ANSWER} for _ in range(4)))
    run = tmp_path / "run"
    words = (f"model={base}", f"data={rows}", f"chat_template={DATED}", "batch_size=2", "eval.n=2", f"run_dir={run}")
    finished("sft", *words, "steps=1", *QUIET)
    messages = [line["message"] for line in read_lines(run / "events.jsonl") if line["kind"] == "alert"]
    assert any("chat_template_date=2026-03-05" in message for message in messages)
    assert "05 Mar 2026" in (run / "samples.md").read_text()
    Day.now = (2026, 3, 6)
    finished("sft", *words, "steps=2", "resume=auto", *QUIET)
    messages = [line["message"] for line in read_lines(run / "events.jsonl") if line["kind"] == "alert"]
    assert any("keeps its original date" in message and "2026-03-05" in message for message in messages)
    assert "05 Mar 2026" in (run / "samples.md").read_text()
    finished("sft", *words[:-1], "steps=1", "chat_template_date=2025-12-01", f"run_dir={tmp_path / 'b'}", *QUIET)
    assert "01 Dec 2025" in (tmp_path / "b" / "samples.md").read_text()


def test_a_row_whose_rendering_fails_is_one_refused_row(base: Path, tmp_path: Path) -> None:
    """Templates refuse rows, or contradict themselves, by what a row says; the other rows are used."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'mad' if 'contradict' in messages[0]['content'] else '' }}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    good = [{"messages": QUESTION + ANSWER} for _ in range(10)]
    system = {"messages": [{"role": "system", "content": "s"}, *QUESTION, *ANSWER]}
    contrary = {"messages": [{"role": "user", "content": "contradict"}, *ANSWER]}
    rows = write(tmp_path / "rows.jsonl", *good, system, contrary)
    words = (
        f"model={base}",
        f"data={rows}",
        f"chat_template={template}",
        "steps=1",
        "batch_size=2",
        "eval.n=2",
        *QUIET,
    )
    finished("sft", *words, "max_bad_rows=0.5", f"run_dir={tmp_path / 'run'}")
    bad = [line for line in read_lines(tmp_path / "run" / "events.jsonl") if line["kind"] == "bad_row"]
    assert [(line["where"], line["field"]) for line in bad] == [
        ("rows.jsonl:11", "messages"),
        ("rows.jsonl:12", "messages"),
    ]
    assert "no system messages" in bad[0]["reason"] and "is inconsistent" in bad[1]["reason"]
    ended = novarl("sft", *words, "max_bad_rows=0.01", f"run_dir={tmp_path / 'refused'}")
    assert ended.code == 2 and "2 of 12 rows cannot be used" in ended.err and "rows.jsonl:11 messages" in ended.err


def test_keys_of_a_template_that_is_left_out_are_refused(base: Path) -> None:
    for word in ("tools=t.json", "chat_template=x", "chat_template_date=2026-01-01", "chat_template_kwargs.a=1"):
        ended = novarl("sample", f"model={base}", "prompt=hi", "apply_chat_template=false", word)
        assert ended.code == 2 and "has no effect with apply_chat_template=false" in ended.err
    ended = novarl("sample", f"model={base}", "prompt=hi", "tools=missing.json")
    assert ended.code == 2 and "tools=missing.json" in ended.err
    ended = novarl("sample", f"model={base}", "prompt=hi", "chat_template_date=2026-02-30")
    assert ended.code == 2 and "chat_template_date: not a valid date: 2026-02-30" in ended.err
    ended = novarl("sample", f"model={base}", "prompt=hi", "chat_template_date=2026-02-03")
    assert ended.code == 2 and "the chat template does not write a date" in ended.err


def test_a_built_in_model_keeps_another_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>:{{ m.content }}<eos>{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>:{% endif %}"
    run = tmp_path / "run"
    words = ("task=sort", f"chat_template={template}", "steps=1", "batch_size=2", "eval.n=2", f"run_dir={run}")
    finished("sft", *words, *QUIET)
    again = load(str(run / "checkpoints" / "latest" / "model"))
    assert again.tokenizer.chat_template == template and again.eos_ids == (257,)


@pytest.mark.parametrize("typed", [True, False])
def test_conversations_with_tools_are_read_from_parquet(base: Path, tmp_path: Path, typed: bool) -> None:
    """By `datasets`' type for JSON, and as structs, whose rows all have every key that one of them has."""
    from datasets import Dataset, Features, Json, List

    call = {"type": "function", "function": {"name": "look_up", "arguments": {"hill": "A"}}}
    other = {"type": "function", "function": {"name": "look_up", "arguments": {"lake": "B"}}}
    rows = [
        {"messages": [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [one]}], "tools": [TOOL]}
        for one in (call, other)
    ]
    kinds = Features({"messages": List(Json()), "tools": List(Json())}) if typed else None
    columns = {name: [row[name] for row in rows] for name in ("messages", "tools")}
    if not typed:
        schema = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
        columns["tools"] = [[schema]] * 2
    Dataset.from_dict(columns, features=kinds).to_parquet(tmp_path / "rows.parquet")
    tokenizer = load(str(base)).tokenizer
    tokenizer.chat_template = CHATML.replace("m['content']", "m['content'] + (m.get('tool_calls') or '') | string")
    (first, second), _ = load_sft(tmp_path / "rows.parquet", tokenizer=tokenizer, max_length=999)
    text, last = tokenizer.decode(first.tokens), tokenizer.decode(second.tokens)
    assert "'arguments': {'hill': 'A'}" in text and '"name": "look_up"' in text
    assert "'arguments': {'lake': 'B'}" in last
