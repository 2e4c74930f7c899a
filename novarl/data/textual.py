"""Rows from JSON, JSON Lines and CSV, read with the standard library so that bad rows can be reported by line."""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError

Place = tuple[str, Mapping[str, Any] | None, str | None]
"""What every reader yields: location, columns or None, error or None."""

_DEEPEST = 100
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def _lines(file: Path) -> Iterator[bytes]:
    """The file's lines without a byte order mark; `.gz` files are decompressed."""
    try:
        with gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb") as stream:
            first = stream.readline()
            yield first.removeprefix(b"\xef\xbb\xbf")
            yield from stream
    except (OSError, EOFError, zlib.error) as error:
        fix = "check that the file is complete and readable"
        raise NovaError(f"cannot be read completely: {error}", where=str(file), fix=fix) from error


def _refusal(value: Any, text: str) -> str | None:
    """Why a parsed JSON value, `text` in the file, cannot be used; None if it can."""
    # The counts are a cheap upper bound of the depth; only unusual rows are walked.
    if text.count("[") + text.count("{") > _DEEPEST and _deeper(value, _DEEPEST):
        return f"JSON nested more than {_DEEPEST} levels deep"
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "contains a lone surrogate, which is not valid text"
    return None if isinstance(value, dict) else f"a row must be an object, not {json_kind(value)}"


def _deeper(value: Any, depth: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _deeper(item, depth - 1) for item in items if isinstance(item, dict | list))


def jsonl_rows(file: Path) -> Iterator[Place]:
    """One object per line; blank lines are skipped. Raises NovaError if the file cannot be read completely."""
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            value, refusal = _parse_line(line)
            yield f"{file.name}:{number}", None if refusal else value, refusal


def _parse_line(line: bytes) -> tuple[Any, str | None]:
    try:
        text = line.decode().rstrip("\r\n")  # otherwise an error at the end is reported in column 1 of the next line
        value = json.loads(text)
    except UnicodeDecodeError as error:
        return None, f"not valid UTF-8 at byte {error.start + 1} of the line"
    except json.JSONDecodeError as error:
        return None, f"not valid JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        return None, f"not usable JSON: {error}"
    return value, _refusal(value, text)


def json_kind(value: Any) -> str:
    """The JSON name of a value's type, with its article.

    >>> json_kind(True), json_kind([1]), json_kind(None)
    ('a boolean', 'a list', 'null')
    """
    if value is None:
        return "null"
    numbers_last = ((bool, "a boolean"), (str, "a string"), (list | tuple, "a list"), (Mapping, "an object"))
    kinds = (*numbers_last, (int | float, "a number"))
    return next((name for kind, name in kinds if isinstance(value, kind)), f"a {type(value).__name__}")


def json_rows(file: Path) -> Iterator[Place]:
    """An array of objects, an object with one list of them, or JSON Lines under the wrong name. NovaError for
    others."""
    try:
        text = b"".join(_lines(file)).decode()
        whole = json.loads(text)
    except UnicodeDecodeError as error:
        raise NovaError(f"not UTF-8 at byte {error.start + 1}", where=str(file), fix="save it as UTF-8") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from jsonl_rows(file)
            return
        what = f"not valid JSON: {error.msg} at column {error.colno}"
        raise NovaError(what, where=f"{file}:{error.lineno}", fix="fix the file") from error
    except (ValueError, RecursionError) as error:
        raise NovaError(f"not valid JSON: {error}", where=str(file), fix="fix the file") from error
    for index, (line, value, element) in enumerate(_elements(text, _start_of_list(file, text, whole))):
        where = f"{file.name}:{line}[{index}]"
        refusal = _refusal(value, element)
        yield where, None if refusal else value, refusal


def _skip(text: str, position: int, mark: str = "") -> int:
    """The position after white space, `mark` and white space."""
    position = _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty string too
    return _SPACE.match(text, position + len(mark)).end()  # type: ignore[union-attr]


def _start_of_list(file: Path, text: str, whole: Any) -> int:
    """The position of the `[` that opens the list of rows. `text` is known to be valid JSON."""
    position = _skip(text, 0)
    if isinstance(whole, list):
        return position
    lists = [key for key, value in whole.items() if isinstance(value, list)] if isinstance(whole, dict) else []
    if len(lists) != 1:
        found = f"an object with {len(lists)} lists" if isinstance(whole, dict) else json_kind(whole)
        fix = "write an array of objects, or an object with one list of them"
        raise NovaError(f"the file contains {found}, not a list of rows", where=str(file), fix=fix)
    position = _skip(text, position, "{")
    while True:
        key, position = _DECODER.raw_decode(text, position)
        position = _skip(text, position, ":")
        if key == lists[0] and text[position] == "[":
            return position
        _, position = _DECODER.raw_decode(text, position)
        position = _skip(text, position, ",")


def _elements(text: str, position: int) -> Iterator[tuple[int, Any, str]]:
    """Line, value and text of each element of the list that opens at `position`. `text` is known to be valid JSON."""
    line, counted = 1, 0
    position = _skip(text, position, "[")
    while text[position] != "]":
        value, end = _DECODER.raw_decode(text, position)
        line, counted = line + text.count("\n", counted, position), position
        yield line, value, text[position:end]
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position, ",")


def csv_rows(file: Path) -> Iterator[Place]:
    """Rows after a header of unique names; an empty cell is null. NovaError for an invalid header. After a bad row,
    reading continues at its second line: a stray quote would swallow all rows up to the next one."""
    csv.field_size_limit(2**31 - 1)
    # Undecodable bytes become lone surrogates, so that a bad byte affects one row and not the file.
    lines = [line.decode(errors="surrogateescape") for line in _lines(file)]
    header, start = _csv_header(file, lines)
    while start < len(lines):
        reader = csv.reader(islice(lines, start, None), strict=True)
        consumed = 0
        try:
            for cells in reader:
                where = f"{file.name}:{start + consumed + 1}"
                consumed = reader.line_num
                if cells:
                    yield _csv_row(where, header, cells)
            return
        except csv.Error as error:
            yield f"{file.name}:{start + consumed + 1}", None, f"not valid CSV: {error}"
            start += consumed + 1


def _csv_header(file: Path, lines: Sequence[str]) -> tuple[list[str], int]:
    reader = csv.reader(lines, strict=True)
    try:
        header = [name.strip() for name in next((cells for cells in reader if cells), [])]
        problem = None if header and all(header) and len(set(header)) == len(header) else "names are empty or repeated"
    except csv.Error as error:
        problem = str(error)
    if problem is None and not all(map(_is_text, header)):
        problem = "not valid UTF-8"
    if problem is not None:
        what = f"the CSV header is invalid: {problem}"
        raise NovaError(what, where=f"{file}:1", fix="give each column a unique name, in UTF-8")
    return header, reader.line_num


def _csv_row(where: str, header: Sequence[str], cells: Sequence[str]) -> Place:
    if len(cells) != len(header):
        return where, None, f"{len(cells)} columns, but the header has {len(header)}"
    for name, cell in zip(header, cells, strict=True):
        if not _is_text(cell):
            return where, None, f"not valid UTF-8 in column {name!r}"
    return where, {name: cell or None for name, cell in zip(header, cells, strict=True)}, None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
