"""The data of train_lm.py: text files as bytes, split into training and held-out files."""

import pathlib
import sysconfig
import zlib

import numpy as np


class Corpus:
    """Windows of bytes from a directory's text files, or from one file.

    One file in twenty is held out, chosen by a hash of its name, so that the split is the same on
    every machine. The last twentieth of a single file is held out.

    Attributes:
      path: the file or folder that was read.
      num_files: how many files were read.
      train: the bytes to train on, (num_bytes,), uint8.
      held_out: the bytes to validate on, (num_bytes,), uint8.
      checksum: CRC-32 of ``train``.
    """

    def __init__(self, path: pathlib.Path | None, context: int):
        """Reads all of ``path``; None reads the source code of Python's own standard library."""
        self.path = path or pathlib.Path(sysconfig.get_path("stdlib"))
        self.context = context
        files = _text_files(self.path, "*.py" if path is None else "*")
        self.num_files = len(files)
        if len(files) == 1:
            text = files[0].read_bytes()
            end = len(text) * 19 // 20
            train, held_out = [text[:end]], [text[end:]]
        else:
            train, held_out = [], []
            for file in files:
                name = file.relative_to(self.path).as_posix()
                is_held_out = zlib.crc32(name.encode()) % 20 == 0
                (held_out if is_held_out else train).append(file.read_bytes())
        self.train = np.frombuffer(b"".join(train), np.uint8)
        self.held_out = np.frombuffer(b"".join(held_out), np.uint8)
        self.checksum = zlib.crc32(self.train)
        if min(len(self.train), len(self.held_out)) <= context:
            raise OSError(
                f"{self.path} is too small: it has {len(self.train)} bytes to train on and "
                f"{len(self.held_out)} held out (1 file in 20), and each must exceed {context}."
            )

    def batch(self, seed: int, step: int, size: int) -> np.ndarray:
        """``size`` random windows (size, context + 1); they depend only on the arguments."""
        starts = np.random.default_rng((seed, step)).integers(
            len(self.train) - self.context, size=size
        )
        return _windows(self.train, starts, self.context + 1)

    def validation(self, size: int) -> np.ndarray:
        """``size`` windows (size, context + 1), evenly spread over the held-out text."""
        starts = np.linspace(0, len(self.held_out) - self.context - 1, size).astype(int)
        return _windows(self.held_out, starts, self.context + 1)

    def prompt(self) -> bytes:
        """``context`` bytes from the middle of the held-out text, up to the end of a line."""
        text = self.held_out.tobytes()
        end = text.find(b"\n", max(self.context, len(text) // 2)) + 1 or len(text)
        return text[end - self.context : end]


def _text_files(path: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    if not path.exists():
        raise OSError(f"{path} does not exist.")
    if path.is_file():
        return [path]
    # Without installed packages and the library's tests, which are mostly data.
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = (f for f in path.rglob(pattern) if not skip & set(f.relative_to(path).parts))
    files = sorted(f for f in files if f.is_file() and not f.name.startswith("."))
    texts = [f for f in files if b"\0" not in f.read_bytes()[:4096]]
    if not texts:
        raise OSError(f"{path} contains no text files.")
    return texts


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length)].astype(np.int32)
