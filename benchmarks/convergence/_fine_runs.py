"""Fine-tuning: what runs start from and read, and the loss of a head on a pre-trained model."""

import dataclasses
import pathlib
import zlib
from collections.abc import Callable
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
import optax
from _fine_data import STARTS, TASKS
from _tasks import Corpus

import optax_ext
from sharding import stored

RANK, LORA_SCALE = 8, 2.0
# How the matrices under the adapters of ``sharding.stored`` are stored, by the mode of a run.
STORED: dict[str, Any] = {
    "lora_16": None,  # bfloat16
    "lora_nf4": stored.frozen(4),
    "lora_linear4": stored.frozen(optax_ext.Linear(4)),
}
SLICE = 22  # windows that are evaluated at once
HEAD = max(TASKS.values())  # classes of every head; those of a task are the first


def prepare(folder: pathlib.Path, size: str, texts: _fine_data.Texts, part: int = 1) -> None:
    """Writes windows, one in ``part``, and models, by the recorded recipe on texts to train on.

    They are those of the longest of the long runs, on its first final seed; without rows, of the
    shortest, as its search starts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "windows.npz", **_fine_data.build(texts, part))
    rows, trainer = _rows.finished(_rows.path(size)), _runs.Trainer()
    corpus = Corpus(None, _sizes.SIZES[_long.size_of(size)].context)
    for split in ("train", "held_out"):
        text = b"".join(file for files in texts[split].values() for file in files)
        setattr(corpus, split, np.frombuffer(text, np.uint8))
    trainer.corpus = lambda context: corpus
    for name in STARTS:
        cell = _long.cell(rows, size, "masked", name, _long.LENGTHS[size][-1 if rows else 0])
        loss = trainer.run((cell.finals or cell.wanted)[0])["loss"]
        print(f"{name}: held-out loss {loss:.4f}", flush=True)
        leaves = jax.tree.leaves(jax.device_get(trainer.params))
        np.savez_compressed(folder / f"start_{name}.npz", *leaves)


class Trainer(_runs.Trainer):
    """Fine-tunes the models of a folder that ``prepare`` wrote."""

    def __init__(self, folder: pathlib.Path, size: str):
        super().__init__()
        of, self.checksum = _sizes.SIZES[_long.size_of(size)], 0
        self.model = _models.Config(of.layers, of.width, of.heads, of.vocabulary, one_hot=True)
        like, self.piece = jax.tree.structure(_models.init(self.model, 0)), of.context
        self.windows = dict(np.load(folder / "windows.npz"))
        leaves = [[*np.load(folder / f"start_{name}.npz").values()] for name in STARTS]
        self.starts = {n: jax.tree.unflatten(like, x) for n, x in zip(STARTS, leaves, strict=True)}
        for array in (*self.windows.values(), *map(np.stack, zip(*leaves, strict=True))):
            self.checksum = zlib.crc32(np.ascontiguousarray(array), self.checksum)
        self.corpus = lambda context: self

    def judge(self, config: _runs.Config) -> _runs.Judge:
        """Cross entropy and accuracy of a linear head on the mean of the last layer."""
        base, classes = self.starts[config["start"]], TASKS[config["task"]]
        model = dataclasses.replace(self.model, dtype=config["dtype"])
        mode, blocks = config["mode"], base["blocks"]
        if mode in STORED:
            form = STORED[mode]
            blocks = [
                {k: _read(x, form) if x.ndim > 1 else x for k, x in of.items()} for of in blocks
            ]

        def adapted(x: Any, adapter: Any) -> Any:
            if mode in STORED:
                return stored.Adapted(x, adapter["down"], adapter["up"], LORA_SCALE)
            return x + LORA_SCALE * adapter["down"] @ adapter["up"]

        def judged(params: Any, batch: Any) -> dict[str, jax.Array]:
            whole = {**base, **params}
            if mode != "full":
                whole["blocks"] = [
                    block | {k: adapted(block[k], x) for k, x in of.items()}
                    for block, of in zip(blocks, params["blocks"], strict=True)
                ]
            return (stored.loss_of(judged_whole) if mode in STORED else judged_whole)(whole, batch)

        def judged_whole(params: Any, batch: Any) -> dict[str, jax.Array]:
            tokens, spans, labels = batch
            whole = jax.tree.map(lambda x: x.astype(model.dtype), params)
            pieces = {"inputs": tokens.reshape(-1, self.piece).astype(jnp.int32)}
            x = _models.last_layer(model, whole, pieces, causal=False)
            x = x.reshape(*tokens.shape, -1).astype(jnp.float32)  # (windows, bytes, width)
            at = jnp.arange(tokens.shape[1])[None]
            asked = ((at >= spans[:, :1]) & (at < spans[:, 1:])).astype(jnp.float32)[..., None]
            logits = (x * asked).sum(1) / asked.sum(1) @ params["head"][:, :classes]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return {"loss": losses.mean(), "accuracy": (logits.argmax(1) == labels).mean()}

        return judged

    def given(self, config: _runs.Config) -> tuple[Any, Callable[[int], Any], Any, Any]:
        """A new head, and adapters or all that the start has; the same for all optimizers.

        Seed 0 is judged by the windows that validate, the others by held-out ones.
        """
        seed, base = config["seed"], self.starts[config["start"]]
        rng, task = np.random.default_rng((seed, 7)), list(TASKS).index(config["task"])
        params = {"head": 0.02 * rng.standard_normal((self.model.width, HEAD), np.float32)}

        def adapter(x: np.ndarray) -> Any:
            down = rng.standard_normal((len(x), RANK), np.float32) * np.float32(len(x) ** -0.5)
            return {"down": down, "up": np.zeros((RANK, x.shape[1]), np.float32)}

        adapters = [{k: adapter(x) for k, x in of.items() if x.ndim > 1} for of in base["blocks"]]
        params |= base if config["mode"] == "full" else {"blocks": adapters}

        def windows(split: str, chosen: Any = slice(None)) -> list[np.ndarray]:
            parts = ("tokens", "spans", "labels")
            return [self.windows[f"{split}_{part}"][task][chosen] for part in parts]

        def batch(step: int) -> list[np.ndarray]:
            number = self.windows["train_labels"].shape[1]
            order = np.random.default_rng((seed, step, 3))
            return windows("train", order.integers(number, size=config["batch"]))

        last = _runs.sliced(windows("held_out" if seed else "validation"), SLICE)
        return params, batch, jax.tree.map(lambda x: x[:1], last), last


def _read(x: np.ndarray, form: Any) -> jax.Array:
    """What is read of a parameter; codes of matrices have blocks of elements in their order."""
    if x.ndim < 2:
        return jnp.asarray(x)
    if form is None:
        return jnp.asarray(x, jnp.bfloat16)
    coded = stored.store({"x": jnp.asarray(x).reshape(-1, 64)}, {"x": form})
    return stored.merge(coded)["x"].reshape(x.shape)
