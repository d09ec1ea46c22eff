"""The models that are fine-tuned, and the files in which they and the windows travel."""

import pathlib
import zlib
from typing import Any

import _fine_data
import _lengths
import _models
import _results
import _rows
import _runs
import _sizes
import jax
import jax.numpy as jnp
import numpy as np
from _tasks import TASKS, Corpus

STARTS = ("adamw", "came_debiased")  # what trained them
SEED = 1  # of the recorded runs the first that chose nothing
AT_ONCE = 500  # steps


def start(rows: _rows.Row, size: str, name: str, found: _fine_data.Texts, to: pathlib.Path) -> None:
    """Trains a start as the longest of the long runs was, on the texts to train on alone."""
    config = {"seed": SEED, **recipe(rows, size, name)}
    program, task = _runs.Program(config), TASKS["masked"]
    corpus = Corpus(None, config["context"])
    for split in ("train", "held_out"):
        text = b"".join(file for files in found[split].values() for file in files)
        setattr(corpus, split, np.frombuffer(text, np.uint8))
    traced = {name: jnp.float32(config["hyper"][name]) for name in _runs.TRACED}
    state = program.init(_models.init(_sizes.model(config), SEED), traced)
    for first in range(0, config["steps"], AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, config["steps"]))
        batches = [task.batch(corpus, SEED, i, config["batch"]) for i in numbers]
        stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
        state, _ = program.train(state, traced, stacked)
    validation = jax.tree.map(lambda x: x[None], task.validation(corpus, 1024))
    print(f"{name}: held-out loss {float(program.evaluate(state[0], validation)):.4f}", flush=True)
    np.savez_compressed(to, *jax.tree.leaves(jax.device_get(state[0])))


def recipe(rows: _rows.Row, size: str, name: str) -> dict[str, Any]:
    """The configuration of the final runs; of made-up sizes that from which a search starts."""
    steps = _lengths.LENGTHS[size][-1]
    if rows:
        return _lengths.cell(rows, size, "masked", name, steps).finals[0]
    trial = _lengths.cell({}, size, "masked", name, _lengths.LENGTHS[size][0]).searching[0]
    return {**trial, "steps": steps, "warmup": steps // 10}


def prepare(folder: pathlib.Path, size: str, texts: _fine_data.Texts, **sizes: Any) -> None:
    """Writes what is not there: the windows, and the models to start from."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = _rows.finished(_results.RESULTS / "convergence" / f"runs_{size}.jsonl")
    if not (path := folder / "windows.npz").exists():
        np.savez_compressed(path, **_fine_data.build(texts, **sizes))
    for name in STARTS:
        if not (path := folder / f"start_{name}.npz").exists():
            start(rows, size, name, texts, path)


def load(folder: pathlib.Path, size: str) -> tuple[dict[str, np.ndarray], Any, int]:
    """The windows, the starts stacked, (starts, ...) each, and a checksum of all."""
    windows = dict(np.load(folder / "windows.npz"))
    files = [np.load(folder / f"start_{name}.npz") for name in STARTS]
    leaves = [np.stack([file[key] for file in files]) for key in files[0].files]
    like = _models.init(_sizes.model(recipe({}, size, STARTS[0])), 0)
    checksum = 0
    for array in [*windows.values(), *leaves]:
        checksum = zlib.crc32(np.ascontiguousarray(array), checksum)
    return windows, jax.tree.unflatten(jax.tree.structure(like), leaves), checksum
