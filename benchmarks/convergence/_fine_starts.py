"""What runs start from: the windows, and two models that the recorded recipe trains."""

import pathlib
import zlib
from typing import Any

import _fine_data
import _long
import _models
import _rows
import _runs
import _sizes
import jax
import jax.numpy as jnp
import numpy as np
from _fine_data import STARTS
from _tasks import TASKS, Corpus

AT_ONCE = 40  # steps


def prepare(folder: pathlib.Path, size: str, texts: _fine_data.Texts, part: int) -> None:
    """Writes windows and models where they are not there; of windows one in ``part``."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (path := folder / "windows.npz").exists():
        np.savez_compressed(path, **_fine_data.build(texts, part))
    for name in STARTS:
        if not (path := folder / f"start_{name}.npz").exists():
            np.savez_compressed(path, *jax.tree.leaves(jax.device_get(_start(size, name, texts))))


def _start(size: str, name: str, texts: _fine_data.Texts) -> Any:
    """Trained as the longest of the long runs, on its first final seed, on texts to train on."""
    config = _recipe(size, name)
    program, task, seed = _runs.Program(config), TASKS["masked"], config["seed"]
    corpus = Corpus(None, config["context"])
    for split in ("train", "held_out"):
        text = b"".join(file for files in texts[split].values() for file in files)
        setattr(corpus, split, np.frombuffer(text, np.uint8))
    traced = {name: jnp.float32(config["hyper"][name]) for name in _runs.TRACED}
    state = program.init(_models.init(_sizes.model(config), seed), traced)
    for first in range(0, config["steps"], AT_ONCE):
        batches = [task.batch(corpus, seed, first + i, config["batch"]) for i in range(AT_ONCE)]
        state, _ = program.train(state, traced, jax.tree.map(lambda *x: np.stack(x), *batches))
    validation = jax.tree.map(lambda x: x[None], task.validation(corpus, 1024))
    print(f"{name}: held-out loss {float(program.evaluate(state[0], validation)):.4f}", flush=True)
    return state[0]


def _recipe(size: str, name: str) -> dict[str, Any]:
    """The configuration of the first final run; without rows that from which a search starts."""
    rows = _rows.finished(_rows.path(size))
    cell = _long.cell(rows, size, "masked", name, _long.LENGTHS[size][-1 if rows else 0])
    return (cell.finals or cell.wanted)[0]


def load(folder: pathlib.Path) -> tuple[dict[str, np.ndarray], list[np.ndarray], int]:
    """The windows, the leaves of the models stacked, (starts, ...) each, and a checksum of all."""
    windows = dict(np.load(folder / "windows.npz"))
    files = [np.load(folder / f"start_{name}.npz") for name in STARTS]
    leaves = [np.stack([file[key] for file in files]) for key in files[0].files]
    checksum = 0
    for array in [*windows.values(), *leaves]:
        checksum = zlib.crc32(np.ascontiguousarray(array), checksum)
    return windows, leaves, checksum
