"""novarl watch and novarl report: mistakes in one line, nothing written into a run, no torch."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from novarl import cli
from novarl.dashboard import report
from novarl.dashboard.commands import report_parser, watch_parser
from novarl.observe.writer import RunWriter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    columns = {"tokens": [1], "pieces": ["</script><b>"], "advantages": [0.5], "entropy": [1.0]}
    with RunWriter(tmp_path / "runs/a", writer="test", config={"a": "<b>"}) as writer:
        for step in range(1, 8):
            writer.step(step, {"reward_mean": step / 10})
            answer = {"prompt": "p", "text": "</script><b>", "index": 0, "reward": 1.0, "columns": columns}
            writer.rollouts(step, [{**answer, "group": group} for group in range(3)])
    return tmp_path / "runs/a"


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("novarl: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


def test_mistakes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "runs/a")
    assert "runs: no such directory" in mistake(capsys, "watch")
    assert "nowhere: no such directory" in mistake(capsys, "watch", "nowhere")
    assert "unrecognized arguments: --prot" in mistake(capsys, "watch", str(run), "--prot")
    assert "--port: must be 0 to 65535" in mistake(capsys, "watch", str(run), "--port", "99999")
    assert "argument --port: invalid int value: 'x'" in mistake(capsys, "watch", "--port", "x")
    assert "the following arguments are required: RUN" in mistake(capsys, "report")
    assert "the directory contains no run" in mistake(capsys, "report", str(run / "rollouts"))
    RunWriter(run.parent / "b", writer="test")
    assert "contains 2 runs: a, b" in mistake(capsys, "report", str(run.parent))
    assert "is a directory" in mistake(capsys, "report", str(run), "--out", str(tmp_path))
    assert "cannot be written: No such file" in mistake(
        capsys, "report", str(run), "--out", str(tmp_path / "no/x.html")
    )
    (tmp_path / "mine.html").write_text("mine")
    assert "exists, and is not a report" in mistake(capsys, "report", str(run), "--out", str(tmp_path / "mine.html"))
    assert "--steps: must be at least 0" in mistake(capsys, "report", str(run), "--steps", "-1")
    (run / "manifest.json").write_text('{"format": 2}')
    assert "run directory format 2" in mistake(capsys, "report", str(run))


def test_a_port_in_use(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = mistake(capsys, "watch", str(run), "--port", port)
    assert f"port {port} is in use by another program (choose another, or --port 0 for any free one)" in said


def test_without_the_extra(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'novarl[dashboard]'" in mistake(capsys, "watch", str(run))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("watch", "report"):
        assert cli.main([command, "--help"]) == 0
        assert f"usage: novarl {command}" in capsys.readouterr().out
        parser = watch_parser() if command == "watch" else report_parser()
        assert all(parser.parse_args(words.split(" ")[1:]) for words in cli.EXAMPLES[command])
    assert cli.main(["--help"]) == 0
    assert "show runs in the browser" in capsys.readouterr().out


def test_a_report_is_one_file_without_network_in_which_text_is_data(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.html"
    assert cli.main(["report", str(run), "--out", str(target), "--steps", "3", "--groups", "2"]) == 0
    text = target.read_text()
    assert not re.findall(r"(?:src|href)=", text.split("<script>")[0]), "it names no other file"
    assert "default-src 'none'" in text and "script-src 'sha256-" in text
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    data = json.loads(block)
    assert "<b>" not in block and data["samples"][0]["groups"][0]["answers"][0]["text"] == "</script><b>"
    assert [sample["step"] for sample in data["samples"]] == [1, 4, 7]
    assert [len(sample["groups"]) for sample in data["samples"]] == [2, 2, 2]
    assert data["curves"]["rl"]["series"]["reward_mean"]["y"][-1] == 0.7
    assert cli.main(["report", str(run), "--out", str(target), "--steps", "0"]) == 0, "an earlier report is replaced"


def test_a_report_of_a_run_without_metrics_or_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunWriter(tmp_path / "bare", writer="test")
    assert cli.main(["report", "bare"]) == 0
    assert (tmp_path / "bare-report.html").is_file()


def test_modules_of_the_report_define_each_name_once() -> None:
    names = re.findall(r"^(?:const|let|function|async function|class) (\w+)", report.bundle(), re.MULTILINE)
    assert names and len(names) == len(set(names))
    assert "import " not in report.bundle().split("\n")[2] and "\nexport " not in report.bundle()


def fingerprint(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


SCRIPT = """
import sys
from novarl.cli import main
assert main(["report", sys.argv[1], "--out", sys.argv[2]]) == 0
import novarl.dashboard.server
assert not {"torch", "transformers", "pydantic", "matplotlib"} & set(sys.modules)
"""


def test_nothing_is_written_into_a_run_and_torch_is_not_loaded(run: Path, tmp_path: Path) -> None:
    before = fingerprint(run.parent)
    command = [sys.executable, "-m", "novarl", "watch", str(run.parent), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert said.startswith("1 run in ") and address
        stream = urllib.request.urlopen(f"{address[0]}/api/events", timeout=30)
        for path in ("/api/run?run=a", "/api/curves?run=a", "/api/groups?run=a&step=1", "/metrics", "/alerts"):
            assert urllib.request.urlopen(address[0] + path, timeout=30).status == 200
        process.terminate()
        stream.read()  # ends, so that the server can end
        assert process.wait(30) in (0, -15)
        assert process.stderr is not None and process.stderr.read() == ""
    words = [sys.executable, "-c", SCRIPT, str(run), str(tmp_path / "out.html")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert fingerprint(run.parent) == before
