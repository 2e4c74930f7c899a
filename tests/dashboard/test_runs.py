"""Which runs are found, what is refused, and one sentence for each run that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from novarl.core.errors import NovaError
from novarl.dashboard.runs import Library, check_places
from novarl.dashboard.views import Book
from novarl.observe.writer import RunWriter


def run(folder: Path, steps: int = 2) -> Path:
    with RunWriter(folder, writer="test", config={"a": {"b": 1}}) as writer:
        for step in range(1, steps + 1):
            writer.step(step, {"reward_mean": step / 10})
    return folder


def names(*places: Path) -> list[str]:
    library = Library(places)
    library.refresh()
    return list(library.runs)


def test_runs_are_found_one_and_two_levels_deep_and_links_not_twice(tmp_path: Path) -> None:
    for name in ("b", "a", "sweep/x", "deep/er/z"):
        run(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "latest").symlink_to("./b")
    assert names(tmp_path) == ["a", "b", "sweep/x"]
    assert names(tmp_path / "latest") == ["b"]
    assert names(tmp_path, tmp_path / "a") == ["a", "b", "sweep/x"]


def test_two_runs_of_the_same_name_are_both_shown(tmp_path: Path) -> None:
    run(tmp_path / "one/x")
    run(tmp_path / "two/x")
    assert names(tmp_path / "one", tmp_path / "two") == ["x", "x (2)"]


def test_new_and_removed_runs_are_noticed(tmp_path: Path) -> None:
    library = Library([tmp_path])
    assert not library.refresh()
    run(tmp_path / "a")
    assert library.refresh() and not library.refresh()
    (tmp_path / "a").rename(tmp_path / "c")
    assert library.refresh() and list(library.runs) == ["c"]


def test_links_that_leave_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "outside")
    inside = run(tmp_path / "runs/inside")
    (tmp_path / "runs/linked").symlink_to(tmp_path / "outside")
    (inside / "metrics.jsonl").unlink()
    (inside / "metrics.jsonl").symlink_to(tmp_path / "outside/metrics.jsonl")
    (inside / "rollouts").symlink_to(tmp_path)
    library = Library([tmp_path / "runs"])
    library.refresh()
    assert list(library.runs) == ["inside"]
    assert len(library.refused) == 1 and "a link that leaves" in library.refused[0]
    for name in ("metrics.jsonl", "rollouts", "../../outside/metrics.jsonl"):
        with pytest.raises(NovaError, match="a link that leaves"):
            library["inside"].file(name)
    assert "a link that leaves" in Book(library).head("inside")["problem"]


def test_a_run_is_only_found_by_its_name(tmp_path: Path) -> None:
    run(tmp_path / "runs/a")
    library = Library([tmp_path / "runs"])
    library.refresh()
    for name in ("../a", "a/", "/", "", str(tmp_path / "runs/a")):
        with pytest.raises(NovaError, match="no run is named"):
            library[name]


def test_a_place_must_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NovaError, match="no such directory"):
        check_places([str(tmp_path / "nowhere")])
    with pytest.raises(NovaError, match="is a file"):
        check_places([str(tmp_path / "file")])


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"manifest.json": '{"format": 2}'}, "run directory format 2; this version of NovaRL reads format 1"),
        ({"manifest.json": '{"form'}, "is damaged: not JSON"),
        ({"summary.json": "[]"}, "is damaged: not a JSON object"),
    ],
)
def test_a_run_that_cannot_be_read_says_why_in_one_sentence(tmp_path: Path, broken: dict[str, str], said: str) -> None:
    folder = run(tmp_path / "a")
    run(tmp_path / "fine")
    for name, text in broken.items():
        (folder / name).write_text(text)
    library = Library([tmp_path])
    book = Book(library)
    heads = {head["name"]: head for head in book.runs()["runs"]}
    assert said in heads["a"]["problem"] and "\n" not in heads["a"]["problem"]
    assert heads["a"]["status"] == "unreadable" and heads["fine"]["status"] == "done"


def test_a_half_written_run_is_shown_with_what_is_absent(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/manifest.json").write_text(json.dumps({"format": 1, "kind": "rl"}))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/metrics.jsonl").write_text('{"step": 1, "phase": "rl", "kl": 0.5}\n{"step": 2, "ph')
    book = Book(Library([tmp_path]))
    new, bare = book.head("new"), book.head("bare")
    assert new["status"] == "empty" and "metrics.jsonl is missing" in " ".join(new["notes"])
    assert bare["status"] == "running" and bare["last"] == {"kl": 0.5, "step": 1.0}
    assert "manifest.json is missing" in " ".join(bare["notes"]) and "no rollouts" in " ".join(bare["notes"])
    assert book.run("new")["phases"] == [] and book.run("bare")["names"] == {"rl": ["kl"]}


def test_a_resumed_run_is_running_again(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    book = Book(Library([tmp_path]))
    assert book.head("a")["status"] == "done"
    RunWriter(folder, writer="test", extend=True).step(3, {"reward_mean": 0.9})
    assert book.head("a")["status"] == "running"
