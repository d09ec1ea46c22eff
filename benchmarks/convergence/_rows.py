"""Finished runs, one line of JSON each, in a file that several processes append to."""

import fcntl
import hashlib
import json
import os
import pathlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import _results

FOLDER = _results.RESULTS / "convergence"

Row = dict[str, Any]


def path(size: str) -> pathlib.Path:
    """Of the runs of a size."""
    return FOLDER / f"runs_{size}.jsonl"


def key_of(config: dict[str, Any]) -> str:
    """A short name of a configuration; the order of its fields does not matter."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def append(path: pathlib.Path, row: Row) -> None:
    """Adds a whole line, also behind one that was cut off."""
    line = json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)


def read(path: pathlib.Path) -> Iterator[Row]:
    """All whole rows; warns of lines that are none."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            warnings.warn(f"{path}, line {number}: not a whole row, ignored.", stacklevel=2)
            continue
        yield row


def finished(path: pathlib.Path, corpus: int | None = None) -> dict[str, Row]:
    """The runs on one text by key: on that of this checksum, or else of most rows.

    Losses on other texts do not compare, so these rows are left out, which is printed.
    """
    rows = list(read(path))
    if corpus is None and rows:
        corpus = Counter(row["corpus"] for row in rows).most_common(1)[0][0]
    others = sum(row["corpus"] != corpus for row in rows)
    if others:
        print(f"{path.name}: {others} rows of other texts than {corpus} are left out.")
    return {row["key"]: row for row in rows if row["corpus"] == corpus}
