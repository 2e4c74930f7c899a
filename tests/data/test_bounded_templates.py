"""A chat template is a program that came with a model: its time, memory, output and recursion are bounded, in one
sentence, and what it writes within the bounds is what transformers writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from novarl import cli
from novarl.core.errors import NovaError
from novarl.data.dataset import load_rl
from novarl.data.formats import Refused
from novarl.data.sources import from_python
from novarl.data.template import write
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.processes import renderer
from tests.data.templates import TEMPLATES, tokenizer as make

CHAT = [{"role": "user", "content": "hello"}]

BEYOND = {
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "exceeds a limit: Range too big"),
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "took longer than 2 s",
    ),
    "product": ("{{ 'a' * 10**10 }}", "exceeds the memory limit of 1 GiB"),
    "power": ("{% set x = 10**9 %}{{ (7 ** x) % 10 }}", "took longer than 2 s"),
    "doubling": (
        "{% set n = namespace(t='ab') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
        "exceeds the memory limit of 1 GiB",
    ),
    "width": ("{{ '%10000000000d' % 1 }}", "exceeds the memory limit of 1 GiB"),
    "indent": ("{{ [1]|tojson(indent=10**10) }}", "exceeds the memory limit of 1 GiB"),
    "join": ("{{ range(99999)|join('y' * 100000) }}", "exceeds the memory limit of 1 GiB"),
    "batch": ("{{ [1]|batch(10**10, 'z')|list }}", "exceeds the memory limit of 1 GiB"),
    "macro": ("{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}", "recurses too deeply"),
    "two macros": (
        "{% macro a(n) %}{{ b(n) }}{% endmacro %}{% macro b(n) %}{{ a(n) }}{% endmacro %}{{ a(0) }}",
        "recurses too deeply",
    ),
    "output": ("{{ 'a' * 30000000 }}", "writes 30,000,000 characters for one conversation"),
    "beyond a reply": ("{{ 'a' * 100000000 }}", "writes 100,000,000 characters for one conversation"),
    "include itself": ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "recurses too deeply"),
}


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A short time limit where it is what ends the template, and one that a busy machine does not reach elsewhere."""
    return lambda said: monkeypatch.setattr(renderer, "TIME_LIMIT", 2.0 if "took longer" in said else 120.0)


def hugging_face(template: str) -> Any:
    tok = make("byte_bpe", "chatml")
    tok.chat_template = template
    return tok


@pytest.mark.parametrize("kind", BEYOND)
def test_a_template_without_end_is_one_sentence(kind: str, limit: Callable[[str], None]) -> None:
    template, said = BEYOND[kind]
    limit(said)
    with pytest.raises(NovaError) as raised:
        write(ByteTokenizer(template), CHAT, generation=True)
    assert str(raised.value).startswith(f"model: the chat template {said}")
    assert "chat_template=FILE" in str(raised.value)
    assert write(ByteTokenizer("{{ messages[0].content }}!"), CHAT, generation=True) == "hello!", "and goes on"


@pytest.mark.parametrize("kind", ["nested loops", "product", "macro", "output"])
def test_the_bounds_hold_for_tokenizers_of_transformers(kind: str, limit: Callable[[str], None]) -> None:
    template, said = BEYOND[kind]
    limit(said)
    with pytest.raises(NovaError, match=said.split("(")[0]):
        write(hugging_face(template), CHAT, generation=True)


def test_a_template_may_behave_until_some_row() -> None:
    tok = hugging_face("{% if messages[0].content == 'bad' %}{{ 'a' * 10**10 }}{% endif %}{{ messages[0].content }}")
    assert write(tok, CHAT, generation=True) == "hello"
    with pytest.raises(NovaError, match="exceeds the memory limit"):
        write(tok, [{"role": "user", "content": "bad"}], generation=True)


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_a_run_on_such_a_template_ends_with_code_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "q", "completion": "a", "answer": "a"}) + "\n")
    words = [
        command,
        "model=tiny",
        f"data={rows}",
        f"run_dir={tmp_path / 'run'}",
        f"chat_template={BEYOND['product'][0]}",
    ]
    assert cli.main([*words, *(["reward=length"] if command == "rl" else [])]) == 2
    said = capsys.readouterr().err
    assert "the chat template exceeds the memory limit of 1 GiB (use another template" in said
    assert "Traceback" not in said


def test_a_template_that_raises_refuses_its_row() -> None:
    tok = hugging_face("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Refused) as raised:
        write(tok, CHAT, generation=True)
    assert raised.value.reason == "the chat template rejects the row: TemplateError: roles must alternate"


def test_a_template_that_rejects_every_row_is_at_fault_itself() -> None:
    rows = from_python(["a", "b"], "data", shown="prompts")
    with pytest.raises(NovaError) as caught:
        load_rl(rows, tokenizer=hugging_face("{{ raise_exception('unknown role') }}"), max_length=9)
    said = "prompts: the chat template rejects every row: prompts[0]: TemplateError: unknown role"
    assert str(caught.value) == f"{said} (pass another template with chat_template=FILE)"


def test_the_sandbox_holds_there_too() -> None:
    with pytest.raises(Refused, match="SecurityError"):
        write(ByteTokenizer("{{ ''.__class__.__mro__[1].__subclasses__() }}"), CHAT, generation=True)


@pytest.mark.parametrize("template", TEMPLATES)
def test_within_the_bounds_it_is_what_transformers_writes(template: str) -> None:
    tok = make("byte_bpe", template)
    rows = [
        [*CHAT, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}],
        [*CHAT, {"role": "assistant", "content": "\ud7ff \u2028 é 𝄞"}, {"role": "user", "content": "0.1\x00"}],
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "é", "parameters": {"n": [1, 2.5, None]}}}]
    for row in rows:
        for given in ({}, {"tools": tools}, {"enable_thinking": False}):
            for generation in (True, False):
                theirs = tok.apply_chat_template(row, tokenize=False, add_generation_prompt=generation, **given)
                assert write(tok, row, generation=generation, template_kwargs=given) == theirs


def test_the_built_in_template_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("novarl.models.byte_tokenizer.render", None)
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert write(ByteTokenizer(), CHAT, generation=True) == "<|user|>hello<eos><|assistant|>"
    assert '{"type": "function"' in write(ByteTokenizer(), CHAT, generation=True, template_kwargs={"tools": tools})


def renderers() -> set[int]:
    """The processes of this one that render templates."""
    command = ["pgrep", "-P", str(os.getpid()), "-f", "novarl.models.rendering"]
    return set(map(int, subprocess.run(command, capture_output=True, text=True).stdout.split()))


def test_one_process_renders_all_and_one_that_died_is_replaced() -> None:
    tok = ByteTokenizer("{{ messages[0].content }}")
    assert write(tok, CHAT, generation=True) == "hello"
    (first,) = renderers()
    assert write(tok, CHAT, generation=True) == "hello" and renderers() == {first}
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert write(tok, CHAT, generation=True) == "hello", "what ended between two rows is not this row's fault"
    assert len(renderers() - {first}) == 1


def test_a_fork_starts_a_process_of_its_own() -> None:
    tok = ByteTokenizer("{{ messages[0].content }}")
    write(tok, CHAT, generation=True)
    mine = renderers()
    child = os.fork()
    if child == 0:
        same = write(tok, CHAT, generation=True) == "hello" and len(renderers()) == 1
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert write(tok, CHAT, generation=True) == "hello" and renderers() == mine
