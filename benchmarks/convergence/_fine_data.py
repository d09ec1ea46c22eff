"""What models are fine-tuned on: labelled windows of Python's library, held out by file."""

import ast
import collections
import io
import pathlib
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator, Sequence

import _tasks  # noqa: F401, finds examples/
import numpy as np
from _corpus import _text_files

WINDOW = 256
TASKS = {"package": 20, "line": 3, "raises": 2}  # classes of each
STARTS = ("adamw", "came_debiased")  # what trained the models that are fine-tuned
SPLITS = {"train": 3072, "validation": 440, "held_out": 880}  # windows
LEAST = 2000  # bytes of a package in each split
SHORTEST = 8  # bytes of a line

Texts = dict[str, dict[str, list[bytes]]]  # by split and top folder
# A label, a text, where its window starts, the bytes that are asked for.
Example = tuple[int, bytes, int, int, int]


def texts(folders: Sequence[str] = ()) -> Texts:
    """All files, or those of some top folders.

    In the order of a hash of the names, a fifth of a folder's files is held out, at least one; the
    next fifth validates. A folder of less than three files is trained on.
    """
    root, by_folder = pathlib.Path(sysconfig.get_path("stdlib")), collections.defaultdict(list)
    for file in _text_files(root, "*.py"):
        name = file.relative_to(root)
        text = zlib.crc32(name.as_posix().encode()), file.read_bytes()
        by_folder["".join(name.parts[:-1][:1])].append(text)
    out: Texts = {split: {} for split in SPLITS}
    for folder in folders or by_folder:
        files = [text for _, text in sorted(by_folder[folder])]
        part = max(1, len(files) // 5) if len(files) > 2 else 0
        out["held_out"][folder], out["validation"][folder] = files[:part], files[part : 2 * part]
        out["train"][folder] = files[2 * part :]
    return out


def build(found: Texts, part: int = 1) -> dict[str, np.ndarray]:
    """Tokens (tasks, windows, 256), spans (tasks, windows, 2) and labels of each split."""
    sizes = {
        folder: [sum(map(len, found[split][folder])) for split in SPLITS]
        for folder in found["train"]
        if folder
    }
    large = [folder for folder, size in sizes.items() if min(size) >= LEAST]
    packages = sorted(sorted(large, key=lambda of: -sizes[of][0])[: TASKS["package"]])
    out: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for number, (split, windows) in enumerate(SPLITS.items()):
        rng, labels = np.random.default_rng(number), np.arange(windows // part)
        joined = [b"".join(found[split][name]) for name in packages]
        files = [file for of in found[split].values() for file in of]
        for examples in (
            [
                (label, text, start, start, start + WINDOW)
                for label, text in enumerate(joined)
                for start in rng.integers(len(text) - WINDOW, size=len(labels)).tolist()
            ],
            [each for file in files for each in _lines(file)],
            [each for file in files for each in _functions(file)],
        ):
            by_class = collections.defaultdict(list)
            for label, *asked in examples:
                by_class[label].append(asked)
            # Classes in turn; each example of a class once before any twice.
            classes = [by_class[label] for label in sorted(by_class)]
            orders, n = [rng.permutation(len(of)) for of in classes], len(classes)
            chosen = [classes[i % n][orders[i % n][i // n % len(orders[i % n])]] for i in labels]
            cut = [text[start : start + WINDOW].ljust(WINDOW, b"\0") for text, start, *_ in chosen]
            spans = np.array([(first - start, last - start) for _, start, first, last in chosen])
            out[f"{split}_tokens"].append(np.array([np.frombuffer(of, np.uint8) for of in cut]))
            out[f"{split}_spans"].append(spans.clip(0, WINDOW).astype(np.int32))
            out[f"{split}_labels"].append((labels % n).astype(np.int32))
    return {name: np.array(of) for name, of in out.items()}


def _lines(text: bytes) -> Iterator[Example]:
    """Code, comments and lines of docstrings; the window has what is around, the mean the line."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant()) as first, *_]:
                documented |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    tokens = tokenize.tokenize(io.BytesIO(text).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    at = 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        first, last = at + len(line) - len(line.lstrip()), at + len(line.rstrip())
        at += len(line)
        if last - first >= SHORTEST:
            is_comment = number in comments and text[first : first + 1] == b"#"
            label = 1 if is_comment else 2 if number in documented else 0
            yield label, text, max((first + last) // 2 - 160, 0), first, last


def _functions(text: bytes) -> Iterator[Example]:
    """Whether one raises, by its first bytes, in which the word itself is blank."""
    blank = re.sub(rb"\braise\b", b"     ", text)
    starts = np.cumsum([0, *map(len, text.splitlines(keepends=True))]).tolist()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = starts[node.lineno - 1], starts[node.end_lineno or 0]
            label = any(isinstance(each, ast.Raise) for each in ast.walk(node))
            yield int(label), blank[:last], first, first, last
