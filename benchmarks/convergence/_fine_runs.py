"""Fine-tuning: runs of one optimizer side by side in one program, from configurations to rows."""

import math
import time
from typing import Any

import _models
import _rows
import _runs
import _sizes
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _contenders import EVERY, transformation
from _fine_data import SPLITS, STARTS, TASKS
from _fine_study import Scale

EARLY = 50  # steps whose loss is kept one by one
RANK, LORA_SCALE = 8, 2.0
SLICE = 22  # windows that are evaluated at once
CLASSES = np.array(list(TASKS.values()))


class Lanes:
    """A compiled program of runs that differ in all but the optimizer and the mode.

    Args:
      config: of one of the runs.
      windows: of all splits.
      starts: leaves of their parameters, (starts, ...) each.
      scale: which has the number of runs, and the steps of a call.
    """

    def __init__(self, config: Any, windows: Any, starts: Any, scale: Scale):
        size = _sizes.SIZES[config["size"]]
        layers, dtype = (size.layers, size.width, size.heads, size.vocabulary), config["dtype"]
        self.model = _models.Config(*layers, dtype, one_hot=True)
        self.piece, self.mode, self.scale = size.context, config["mode"], scale
        self.contender, self.betas = EVERY[config["contender"]], config["hyper"]
        like = jax.tree.structure(_models.init(self.model, 0))
        parts = ("tokens", "spans", "labels")
        of_splits = {split: [windows[f"{split}_{part}"] for part in parts] for split in SPLITS}
        self.starts, self.splits = jax.device_put((jax.tree.unflatten(like, starts), of_splits))
        self.init = jax.jit(jax.vmap(lambda params, rate: self._tx(rate, 0, 1).init(params)))
        train = jax.vmap(self._train, (0, 0, 0, 0, 0, 0, None, None, None, None))
        self.train = jax.jit(train, donate_argnums=(0, 1))
        self.evaluate = jax.jit(jax.vmap(self._evaluate, (0, 0, 0, None, None)))

    def run(self, configs: list[Any]) -> list[_rows.Row]:
        """What at most ``scale.lanes`` runs of equal steps reached, and the seconds of each.

        Those of seed 0 are judged by the windows that validate, the others by held-out ones.
        """
        began, worked = time.perf_counter(), time.process_time()
        every = [configs[i % len(configs)] for i in range(self.scale.lanes)]
        params = jax.tree.map(lambda *x: np.stack(x), *[self._start(c) for c in every])
        start, task = (
            np.array([list(names).index(c[which]) for c in every])
            for which, names in (("start", STARTS), ("task", TASKS))
        )
        rate = np.array([c["hyper"]["learning_rate"] for c in every], np.float32)
        steps, warmup = configs[0]["steps"], configs[0]["warmup"]
        state, losses = self.init(params, rate), []
        for first in range(0, steps, self.scale.chunk):
            order = np.stack([self._order(c, first) for c in every])
            shared = warmup, steps, self.splits["train"], self.starts
            (params, state), loss = self.train(params, state, start, task, rate, order, *shared)
            losses.append(loss)
        early = np.concatenate(jax.device_get(losses[:EARLY]), axis=1)[:, :EARLY]
        splits = ["held_out" if config["seed"] else "validation" for config in configs]
        lanes = params, start, task
        judged = {
            split: jax.device_get(self.evaluate(*lanes, self.splits[split], self.starts))
            for split in set(splits)
        }
        spent = time.perf_counter() - began, time.process_time() - worked
        seconds, cpu_seconds = (_runs.number(x / len(configs)) for x in spent)
        return [
            {
                "key": _rows.key_of(config),
                "config": config,
                "loss": _runs.number(judged[split][0][lane]),
                "accuracy": _runs.number(judged[split][1][lane]),
                "diverged": not math.isfinite(judged[split][0][lane]),
                "early_loss": [_runs.number(x) for x in early[lane]],
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
            }
            for lane, (config, split) in enumerate(zip(configs, splits, strict=True))
        ]

    def _tx(self, rate: Any, warmup: Any, steps: Any) -> optax.GradientTransformation:
        hyper = {**self.betas, "learning_rate": rate}
        return transformation(self.contender, hyper, warmup, steps)

    def _losses(self, params: Any, base: Any, task: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Cross entropies and hits, (windows,), of a linear head on the mean of the last layer."""
        tokens, spans, labels = batch
        whole = jax.tree.map(lambda x: x.astype(self.model.dtype), _merged(base, params))
        pieces = {"inputs": tokens.reshape(-1, self.piece).astype(jnp.int32)}
        x = _models.last_layer(self.model, whole, pieces, causal=False)
        x = x.reshape(*tokens.shape, -1).astype(jnp.float32)  # (windows, bytes, width)
        at = jnp.arange(tokens.shape[1])[None]
        asked = ((at >= spans[:, :1]) & (at < spans[:, 1:])).astype(jnp.float32)[..., None]
        logits = (x * asked).sum(1) / asked.sum(1) @ params["head"]
        used = jnp.arange(CLASSES.max()) < jnp.asarray(CLASSES)[task]
        logits = jnp.where(used[None], logits, -1e9)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses, logits.argmax(1) == labels

    def _loss(self, *arguments: Any) -> jax.Array:
        return self._losses(*arguments)[0].mean()

    def _train(
        self, params: Any, state: Any, start: Any, task: Any, rate: Any, order: Any, *shared: Any
    ) -> Any:
        warmup, steps, windows, starts = shared
        base, tx = jax.tree.map(lambda x: x[start], starts), self._tx(rate, warmup, steps)

        def step(carry: Any, chosen: jax.Array) -> Any:
            params, state = carry
            batch = [x[task, chosen] for x in windows]
            loss, grads = jax.value_and_grad(self._loss)(params, base, task, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, state), order)

    def _evaluate(self, params: Any, start: Any, task: Any, windows: Any, starts: Any) -> Any:
        base = jax.tree.map(lambda x: x[start], starts)
        sliced = [x[task].reshape(-1, SLICE, *x.shape[2:]) for x in windows]
        losses, hits = jax.lax.map(lambda b: self._losses(params, base, task, b), sliced)
        return losses.mean(), hits.mean()

    def _start(self, config: Any) -> Any:
        """What is trained, drawn by NumPy: the head, and adapters or all that the start has."""
        rng = np.random.default_rng((config["seed"], 7))
        params = jax.tree.map(lambda x: np.asarray(x[STARTS.index(config["start"])]), self.starts)
        head = 0.02 * rng.standard_normal((self.model.width, CLASSES.max()), np.float32)
        if self.mode == "full":
            return {**params, "head": head}

        def adapter(x: np.ndarray) -> Any:
            down = rng.standard_normal((len(x), RANK), np.float32) * np.float32(len(x) ** -0.5)
            return {"down": down, "up": np.zeros((RANK, x.shape[1]), np.float32)}

        blocks = [{k: adapter(x) for k, x in b.items() if x.ndim > 1} for b in params["blocks"]]
        return {"head": head, "blocks": blocks}

    def _order(self, config: Any, first: int) -> np.ndarray:
        """Windows of each step, (chunk, batch): the same for all optimizers."""
        number, batch = self.splits["train"][2].shape[1], config["batch"]
        seeds = ((config["seed"], step, 3) for step in range(first, first + self.scale.chunk))
        return np.stack([np.random.default_rng(s).integers(number, size=batch) for s in seeds])


def _merged(base: Any, params: Any) -> Any:
    """All parameters but the head."""
    if "embed" in params:
        return {name: x for name, x in params.items() if name != "head"}
    blocks = [
        {k: x + LORA_SCALE * to[k]["down"] @ to[k]["up"] if k in to else x for k, x in of.items()}
        for of, to in zip(base["blocks"], params["blocks"], strict=True)
    ]
    return {**base, "blocks": blocks}
