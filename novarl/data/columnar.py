"""Rows from Parquet, Arrow and `save_to_disk` directories (pyarrow) and from the Hugging Face Hub (`datasets`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError

_OF_CHAT = ("tools", "chat_template_kwargs")

Row = tuple[str, dict[str, Any], None]
"""Location (`file:number`, from 1), columns, no error: these formats fail as a whole file."""


def parquet_rows(file: Path) -> Iterator[Row]:
    """The rows of a Parquet file. Raises NovaError immediately if the file is damaged."""
    import pyarrow.parquet

    with _damaged(file):
        table = pyarrow.parquet.ParquetFile(file)
    return _rows(file, table.iter_batches())


def arrow_rows(file: Path) -> Iterator[Row]:
    """The rows of an Arrow IPC file or stream (as `datasets` writes). Raises NovaError immediately if it is damaged."""
    import pyarrow

    with _damaged(file):
        source = pyarrow.memory_map(str(file))
        if source.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(source)
            return _rows(file, (reader.get_batch(i) for i in range(reader.num_record_batches)))
        source.seek(0)
        return _rows(file, pyarrow.ipc.open_stream(source))


def saved_rows(directory: Path, split: str | None) -> Iterator[Row]:
    """The rows of a directory written by `save_to_disk` of `datasets`. The default split is "train"."""
    if (directory / "dataset_dict.json").exists():
        splits = _manifest(directory / "dataset_dict.json").get("splits", [])
        wanted = split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
        if wanted not in splits:
            fix = f"available: {', '.join(map(str, splits))}"
            raise NovaError(f"has no split {wanted!r}", where=str(directory), fix=fix)
        directory = directory / wanted
    elif split is not None:
        raise NovaError(f"has no splits, but {split!r} was requested", where=str(directory), fix="leave it out")
    state = _manifest(directory / "state.json")
    if state.get("_indices_data_files"):
        raise NovaError("was saved by datasets 1.x with an indices mapping", where=str(directory), fix="save it again")
    try:
        files = [directory / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise NovaError("lists no data files", where=str(directory / "state.json"), fix="save it again") from error
    for file in files:
        if not file.is_file():
            raise NovaError("the data file is missing", where=str(file), fix="copy the whole directory again")
    return (row for rows in [arrow_rows(file) for file in files] for row in rows)


def from_hub(name: str, config: str | None, split: str) -> Iterator[Row]:
    """The rows of a Hub dataset, or of a directory of data files, loaded with `datasets`."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        fix = "pip install 'novarl[llm]' (in a clone: pip install -e '.[llm]'), or use a local file"
        raise NovaError("loading a dataset from the Hub requires the package datasets", where=name, fix=fix) from error
    try:
        rows = load_dataset(name, config, split=split)
    except Exception as error:
        what = f"no such file, and it could not be loaded as a dataset: {type(error).__name__}: {_short(error)}"
        fix = "check the path, the Hub id, the split and the network"
        if Path(name).is_dir():
            cause = error.__cause__ or error
            what = f"the directory could not be loaded as a dataset: {type(cause).__name__}: {_short(cause)}"
            fix = "pass the files one at a time; bad rows are then reported by line"
        raise NovaError(what, where=f"{name}@{split}", fix=fix) from error
    label = f"{Path(name).name if Path(name).is_dir() else name}@{split}"
    return ((f"{label}:{number}", plain(row), None) for number, row in enumerate(rows, start=1))


def plain(value: Any) -> Any:
    """Convert a column value to JSON types, recursively. Other types (such as dates) become strings."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _rows(file: Path, batches: Iterable[Any]) -> Iterator[Row]:
    number = 0
    with _damaged(file):
        for batch in batches:
            batch.validate(full=True)  # the offsets of a damaged file can be out of bounds and crash the process
            types = {field.name: field.type for field in batch.schema}
            for row in batch.to_pylist():
                number += 1
                value = {name: _decoded(item, types[name], in_chat=name in _OF_CHAT) for name, item in row.items()}
                yield f"{file.name}:{number}", plain(value), None


def _decoded(value: Any, kind: Any, *, in_chat: bool) -> Any:
    """Decode a value by its Arrow type. In messages and `in_chat`, null fields are dropped: each struct has all
    keys."""
    import pyarrow

    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_decoded(item, kind.value_type, in_chat=in_chat) for item in value]
    if isinstance(value, dict) and pyarrow.types.is_struct(kind):
        in_chat |= value.get("role") is not None
        return {
            name: _decoded(item, kind.field(name).type, in_chat=in_chat)
            for name, item in value.items()
            if item is not None or not in_chat
        }
    return value


@contextmanager
def _damaged(file: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        what = f"is damaged or not a {file.suffix.lstrip('.')} file: {_short(error)}"
        raise NovaError(what, where=str(file), fix="write or copy it again") from error


def _manifest(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NovaError(f"cannot be read: {_short(error)}", where=str(file), fix="save the dataset again") from error
    if not isinstance(value, dict):
        raise NovaError("is not the manifest of a saved dataset", where=str(file), fix="save the dataset again")
    return value


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:197]}..."
