"""A checkpoint is whole or absent: whatever operation of a save is the last, the run can go on from a good one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from novarl.core import checkpoint as module
from novarl.core.checkpoint import Checkpoints, Disk, damage, open_checkpoint
from novarl.core.errors import NovaError


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


class DyingDisk(Disk):
    """Dies before operation number `at`, or in its middle where the operation writes."""

    def __init__(
        self, at: int, *, torn: bool = False, error: type[BaseException] | Callable[[], BaseException] = Killed
    ) -> None:
        self.at, self.torn, self.error, self.count = at, torn, error, 0
        self.names: list[str] = []

    def _reached(self, name: str) -> bool:
        self.names.append(name)
        self.count += 1
        return self.count - 1 == self.at

    def write(self, path: Path, data: bytes) -> None:
        if self._reached(f"write {path.name}"):
            if self.torn:
                super().write(path, data[: len(data) // 2])
            raise self.error()
        super().write(path, data)

    def produce(self, path: Path, writer: Callable[[Path], None]) -> None:
        if self._reached(f"produce {path.name}"):
            if self.torn:
                writer(path)
                files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
                for file in files:
                    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            raise self.error()
        super().produce(path, writer)

    def sync(self, path: Path) -> None:
        if self._reached(f"sync {path.name}"):
            raise self.error()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        if self._reached(f"rename {target.name}"):
            raise self.error()
        super().rename(source, target)

    def link(self, path: Path, target: str) -> None:
        if self._reached(f"link {path.name}"):
            raise self.error()
        super().link(path, target)

    def remove(self, path: Path) -> None:
        if self._reached(f"remove {path.name}"):
            if self.torn and path.is_dir():
                (path / "state.json").unlink(missing_ok=True)
            raise self.error()
        super().remove(path)


def write_model(value: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([value]) * 100)
        (folder / "config.json").write_text("{}")

    return write


def state(value: int) -> dict:
    return {
        "loop": {"step": value, "nan": None},
        "weights": [torch.full((3,), float(value)), torch.arange(4)],
        "note": "é\n",
    }


def save(checkpoints: Checkpoints, value: int) -> None:
    checkpoints.save(f"step-{value:06d}", state(value), write_model(value), order=value)


def operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    disk = DyingDisk(-1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "DISK", disk)
        save(Checkpoints(tmp_path / "count", keep=2), 1)
    return disk.names


def test_round_trip(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 3)
    found, troubles = checkpoints.find()
    assert found is not None and found.order == 3 and troubles == []
    loaded = found.load()
    assert loaded["loop"] == {"step": 3, "nan": None} and loaded["note"] == "é\n"
    assert torch.equal(loaded["weights"][0], torch.full((3,), 3.0)) and loaded["weights"][1].dtype == torch.int64
    assert (found.model / "model.safetensors").read_bytes() == b"\x03" * 100


def test_every_operation_of_a_save_can_be_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = operations(tmp_path, monkeypatch)
    assert len(names) > 10 and any(name.startswith("rename") for name in names)
    outcomes = set()
    for torn in (False, True):
        for at in range(len(names)):
            folder = tmp_path / f"{torn}-{at}"
            checkpoints = Checkpoints(folder, keep=2)
            save(checkpoints, 1)
            with monkeypatch.context() as patch:
                patch.setattr(module, "DISK", DyingDisk(at, torn=torn))
                with pytest.raises(Killed):
                    save(checkpoints, 2)
            found, _ = checkpoints.find()
            assert found is not None and damage(found.path) is None
            outcomes.add(found.order)
            assert found.load()["loop"]["step"] == found.order
            save(checkpoints, 3)  # the next save clears what was left and works
            again, troubles = checkpoints.find()
            assert again is not None and again.order == 3 and not list(folder.glob(".*")), troubles
    assert outcomes == {1, 2}  # some kills come after the rename: then the new one counts


def test_full_disk_keeps_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = operations(tmp_path, monkeypatch)
    checkpoints = Checkpoints(tmp_path / "full", keep=2)
    save(checkpoints, 1)
    for at in range(len(names)):
        with monkeypatch.context() as patch:
            patch.setattr(
                module, "DISK", DyingDisk(at, torn=True, error=lambda: OSError(errno.ENOSPC, "No space left on device"))
            )
            with pytest.raises(OSError, match="No space"):
                save(checkpoints, 2)
        found, _ = checkpoints.find()
        assert found is not None and found.order in (1, 2)


def test_damage_is_seen_and_the_previous_one_is_used(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 1)
    save(checkpoints, 2)
    path = tmp_path / "step-000002" / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    found, troubles = checkpoints.find()
    assert found is not None and found.order == 1
    assert troubles == ["step-000002: the checksum of model/model.safetensors does not match"]
    with pytest.raises(NovaError, match="damaged"):
        open_checkpoint(tmp_path / "step-000002")
    (tmp_path / "step-000001" / "MANIFEST").unlink()
    assert checkpoints.find()[0] is None


def test_a_newer_one_that_cannot_say_its_order_is_named_and_an_older_one_is_not(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    for value in (1, 2, 3):
        save(checkpoints, value)
    for value, text in ((1, ""), (3, '{"order": ')):
        (tmp_path / f"step-{value:06d}" / "state.json").write_text(text)
    (tmp_path / "mine").mkdir()  # somebody's own folder is no checkpoint
    found, troubles = checkpoints.find()
    assert found is not None and found.order == 2
    assert troubles == ["step-000003: the checksum of state.json does not match"]


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    """`.nfs…`, which some file systems make of files that are still open, cannot even be removed."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    for name in (".nfs0001", ".git", "notes", "step-1"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step-000009.saving").mkdir()
    save(checkpoints, 2)
    checkpoints.mend()
    kept = {".nfs0001", ".git", "notes", "step-1", "step-000002", "latest"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_what_cannot_be_removed_does_not_stop_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    class Busy(Disk):
        def remove(self, path: Path) -> None:
            raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(module, "DISK", Busy())
        save(checkpoints, 2)
    assert (tmp_path / ".step-000001.dropped").is_dir() and links(tmp_path) == {"latest": "step-000002"}
    save(checkpoints, 3)
    assert not list(tmp_path.glob(".*"))


def test_other_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT", 99)
    save(Checkpoints(tmp_path, keep=1), 1)
    monkeypatch.undo()
    with pytest.raises(NovaError, match="format 99"):
        open_checkpoint(tmp_path / "step-000001")


def test_keeps_the_last_k_and_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for value in range(1, 6):
        checkpoints.save(f"step-{value:06d}", state(value), write_model(value), order=value, best=value == 2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-000004", "step-000005"]
    assert os.readlink(tmp_path / "latest") == "step-000005" and (tmp_path / "best" / "model").is_dir()


def test_a_branch_that_is_left_is_set_aside(tmp_path: Path) -> None:
    """Whole checkpoints after the one that a run goes on from, which would be taken for newer ones."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    for value in (2, 5, 6):
        save(Checkpoints(tmp_path, keep=9), value)
    Checkpoints(tmp_path, keep=9).save("step-000005", state(5), write_model(5), order=5, best=True)
    (tmp_path / "step-000006" / "state.json").with_name("MANIFEST").write_text("{}")  # torn
    assert checkpoints.abandon(6) == [] and checkpoints.abandon(2) == ["abandoned-1-step-000005"]
    assert os.readlink(tmp_path / "latest") == "step-000002" and not (tmp_path / "best").is_symlink()
    found, _ = checkpoints.find()
    assert found is not None and found.order == 2
    for value in (3, 4):
        save(checkpoints, value)
    found, _ = checkpoints.find()
    assert found is not None and found.order == 4
    names = {path.name for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()}
    assert names == {"abandoned-1-step-000005", "step-000003", "step-000004", "step-000006"}, (
        "what is set aside takes no place"
    )
    save(checkpoints, 5)
    assert checkpoints.abandon(4) == ["abandoned-2-step-000005"]


def test_unsaveable_state_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="set"):
        Checkpoints(tmp_path, keep=1).save("x", {"a": {1, 2}}, write_model(1), order=1)


# --------------------------------------------------------------------------------- the links are derived, never trusted


def save_best(checkpoints: Checkpoints, value: int) -> None:
    checkpoints.save(f"step-{value:06d}", state(value), write_model(value), order=value, best=True)


def links(folder: Path) -> dict[str, str]:
    return {name: os.readlink(folder / name) for name in ("latest", "best") if (folder / name).is_symlink()}


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize("torn", [False, True])
def test_after_a_kill_at_any_operation_the_links_and_the_pruning_are_made_good(
    torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last save of a run, which no later one repairs: it is the best one, and pushes an older one out."""

    def begin(folder: Path) -> Checkpoints:
        checkpoints = Checkpoints(folder, keep=2)
        save_best(checkpoints, 1)
        for value in (2, 3):
            save(checkpoints, value)
        return checkpoints

    counted = DyingDisk(-1)
    checkpoints = begin(tmp_path / "count")
    with monkeypatch.context() as patch:
        patch.setattr(module, "DISK", counted)
        save_best(checkpoints, 4)
    names = counted.names
    assert {"rename latest", "rename best", "rename .step-000001.dropped"} <= set(names)
    stale = 0
    for at in range(len(names)):
        folder = tmp_path / f"{at}"
        checkpoints = begin(folder)
        with monkeypatch.context() as patch:
            patch.setattr(module, "DISK", DyingDisk(at, torn=torn))
            with pytest.raises(Killed):
                save_best(checkpoints, 4)
        newest, _ = checkpoints.find()
        assert newest is not None
        right = {"latest": f"step-{newest.order:06d}", "best": "step-000004" if newest.order == 4 else "step-000001"}
        stale += links(folder) != right
        checkpoints.mend()
        assert links(folder) == right, names[at]
        checkpoints.prune()
        assert steps(folder) == ([3, 4] if newest.order == 4 else [1, 2, 3]), names[at]
        assert not list(folder.glob(".*")), names[at]
    assert stale >= 2, "no kill left a link behind: this test shows nothing"


def test_mending_changes_nothing_where_all_is_well(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save_best(checkpoints, 1)
    save(checkpoints, 2)
    before = {path.name: path.lstat().st_mtime_ns for path in tmp_path.iterdir()}
    checkpoints.mend()
    checkpoints.prune()
    assert {path.name: path.lstat().st_mtime_ns for path in tmp_path.iterdir()} == before
    Checkpoints(tmp_path / "none", keep=1).mend()
    assert not (tmp_path / "none").exists()


def test_a_copy_that_followed_links_has_links_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", keep=3)
    save_best(checkpoints, 1)
    save(checkpoints, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # follows links
    copy = Checkpoints(tmp_path / "copy", keep=3)
    assert (tmp_path / "copy" / "latest").is_dir() and not links(tmp_path / "copy")
    copy.mend()
    assert links(tmp_path / "copy") == {"latest": "step-000002", "best": "step-000001"} and steps(
        tmp_path / "copy"
    ) == [
        1,
        2,
    ]
    save(copy, 3)
    assert links(tmp_path / "copy")["latest"] == "step-000003"


def test_a_copy_of_the_latest_alone_is_a_run_to_go_on_with(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", keep=3)
    save(checkpoints, 7)
    shutil.copytree(tmp_path / "run" / "step-000007", tmp_path / "copy" / "latest")
    copy = Checkpoints(tmp_path / "copy", keep=3)
    copy.mend()
    found, troubles = copy.find()
    assert found is not None and (found.path.name, found.order, troubles) == ("step-000007", 7, [])
    assert links(tmp_path / "copy") == {"latest": "step-000007"}


@pytest.mark.parametrize("to", ["step-000001", "gone", "/nowhere", "step-000002/"])
def test_a_link_that_leads_elsewhere_is_set_right(to: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    save_best(checkpoints, 1)
    save_best(checkpoints, 2)
    for name in ("latest", "best"):
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to(to)
    checkpoints.mend()
    assert {name: (tmp_path / name).resolve().name for name in ("latest", "best")} == dict.fromkeys(
        ("latest", "best"), "step-000002"
    )


def test_where_the_best_one_is_damaged_the_link_leads_to_the_best_whole_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    save_best(checkpoints, 1)
    save_best(checkpoints, 2)
    save(checkpoints, 3)
    (tmp_path / "step-000002" / "model" / "model.safetensors").write_bytes(b"")
    checkpoints.mend()
    assert links(tmp_path) == {"latest": "step-000003", "best": "step-000001"}


def test_half_of_a_checkpoint_that_an_older_prune_left_is_removed_in_time(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for value in (1, 2):
        save(checkpoints, value)
    (tmp_path / "step-000001" / "state.json").unlink()
    save(checkpoints, 3)
    assert steps(tmp_path) == [2, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "its MANIFEST is damaged: not JSON"),
        ("[]", "its MANIFEST is damaged: not a JSON object"),
        ("[" * 100_000, "its MANIFEST is damaged: it is nested too deeply"),
        ("\udcff", "its MANIFEST is damaged: not UTF-8 text"),
        ('{"state.json": "x"}', "its MANIFEST does not list its files"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named(text: str, said: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    (tmp_path / "step-000001" / "MANIFEST").write_text(text, errors="surrogateescape")
    assert (damage(tmp_path / "step-000001") or "").startswith(said)
