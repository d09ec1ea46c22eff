"""One training run, from a configuration to a row."""

import datetime
import functools
import importlib.metadata
import json
import math
import pathlib
import pickle
import platform
import time
from collections.abc import Callable
from typing import Any

import _models
import _results
import _rows
import _sizes
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _contenders import EVERY, transformation
from _tasks import TASKS, VOCABULARY, Corpus

POINTS = 20  # of the curves of validation loss
EARLY = 64  # steps whose loss and update are kept one by one
SAVE_EVERY = 60.0  # seconds between checkpoints

TRACED = ("learning_rate", "weight_decay")

Config = dict[str, Any]
Judge = Callable[[Any, Any], dict[str, jax.Array]]


class Program:
    """Compiled training of a task by a contender; learning rate and weight decay are inputs.

    Args:
      config: a run's; its seed, learning rate and weight decay do not matter.
      judge: the loss of parameters on a batch, and what else held-out windows are asked.
    """

    def __init__(self, config: Config, judge: Judge):
        steps, warmup, contender = config["steps"], config["warmup"], EVERY[config["contender"]]
        betas = {k: v for k, v in config["hyper"].items() if k not in TRACED}

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            return judge(params, batch)["loss"]

        def make(traced: dict[str, jax.Array]) -> Any:
            return transformation(contender, {**betas, **traced}, warmup, steps)

        def init(params: Any, traced: dict[str, jax.Array]) -> Any:
            params = jax.tree.map(lambda x: x.astype(contender.param_dtype), params)
            return params, make(traced).init(params)

        def train(state: Any, traced: dict[str, jax.Array], batches: Any) -> Any:
            tx = make(traced)

            def step(state: Any, batch: Any) -> Any:
                params, opt_state = state
                loss, grads = jax.value_and_grad(loss_fn)(params, batch)
                updates, opt_state = tx.update(grads, opt_state, params)
                params = optax.apply_updates(params, updates)
                return (params, opt_state), (loss, _matrix_rms(updates))

            return jax.lax.scan(step, state, batches)

        self.init = jax.jit(init)
        self.train = jax.jit(train, donate_argnums=0)
        # In slices of a training batch: what is in memory at once stays small.
        self.evaluate = jax.jit(
            lambda params, batches: jax.tree.map(
                jnp.mean, jax.lax.map(lambda b: judge(params, b), batches)
            )
        )


def _matrix_rms(updates: Any) -> jax.Array:
    """Root mean square of the updates of all matrices."""
    matrices = [u for u in jax.tree.leaves(updates) if u.ndim > 1]
    total = sum(jnp.sum(jnp.square(u)) for u in matrices)
    return jnp.sqrt(total / sum(u.size for u in matrices))


def signature(config: Config) -> str:
    """Of the program of a run, which learning rates, weight decays and seeds share."""
    hyper = {name: x for name, x in config["hyper"].items() if name not in TRACED}
    return json.dumps({**config, "hyper": hyper, "seed": None})


class Trainer:
    """Runs configurations; keeps the last programs.

    Args:
      path: of the text, as Corpus takes it.
      speed: whether rows also have the speed of training and the peak of the device's memory.
    """

    def __init__(self, path: Any = None, speed: bool = False):
        self._speed = speed
        self._commit = _results.commit()  # as the code was when it was loaded
        self.corpus = functools.cache(lambda context: Corpus(path, context))
        self.params: Any = None  # of the last run that ended
        self._program = functools.lru_cache(3)(
            lambda text: Program(json.loads(text), self.judge(json.loads(text)))
        )

    def judge(self, config: Config) -> Judge:
        """What a run is judged by: the loss alone."""
        causal, model = TASKS[config["task"]].causal, _sizes.model(config)
        return lambda params, batch: {"loss": _models.loss_fn(model, params, batch, causal)}

    def given(self, config: Config) -> tuple[Any, Callable[[int], Any], Any, Any]:
        """First parameters, the batch of a step, slices that judge: of the curve, at the end."""
        task, size = TASKS[config["task"]], _sizes.SIZES[config["size"]]
        corpus, windows = self.corpus(config["context"]), (size.curve_windows, size.final_windows)
        return (
            _models.init(_sizes.model(config), config["seed"], task.encoder_decoder),
            lambda step: task.batch(corpus, config["seed"], step, config["batch"]),
            *(sliced(task.validation(corpus, number), size.slice) for number in windows),
        )

    def run(
        self, config: Config, folder: pathlib.Path | None = None, until: float = math.inf
    ) -> _rows.Row | None:
        """Trains; ends early where the loss is no number any more.

        Args:
          config: of the run.
          folder: where it is saved every minute, and goes on from.
          until: when to stop, as time.monotonic() counts; needs ``folder``.

        Returns:
          The row; None if the run was stopped, and saved.
        """
        started, worked = time.perf_counter(), time.process_time()
        program, steps = self._program(signature(config)), config["steps"]
        params, batch_of, points, last = self.given(config)
        window = config.get("context") or config["window"]
        checksum = self.corpus(window).checksum
        traced = {name: jnp.float32(config["hyper"][name]) for name in TRACED}
        state = program.init(params, traced)
        sizes = [sum(x.nbytes for x in jax.tree.leaves(part)) for part in state]
        num_params = sum(x.size for x in jax.tree.leaves(state[0]))
        log: dict[str, Any] = {"curve": [], "loss": [], "rms": [], "commits": []}
        log |= {"train_seconds": [], "peak_bytes": 0}
        log |= {"seconds": 0.0, "cpu_seconds": 0.0}
        saved = folder and folder / f"{_rows.key_of(config)}-{checksum}"
        if saved and saved.exists():
            leaves, log = pickle.loads(saved.read_bytes())
            state = jax.tree.unflatten(jax.tree.structure(state), leaves)
        log["commits"] = list(dict.fromkeys([*log["commits"], self._commit]))

        def note_time() -> None:
            nonlocal started, worked
            log["seconds"] += time.perf_counter() - started
            log["cpu_seconds"] += time.process_time() - worked
            started, worked = time.perf_counter(), time.process_time()

        each, last_save = steps // POINTS, time.monotonic()
        for start in range(len(log["loss"]), steps, each):
            begun = time.monotonic()
            batches = [batch_of(i) for i in range(start, start + each)]
            stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
            dispatched = time.perf_counter()
            state, (loss, update) = program.train(state, traced, stacked)
            log["loss"].extend(np.asarray(loss).tolist())
            log["train_seconds"].append(time.perf_counter() - dispatched)
            log["peak_bytes"] = max(log["peak_bytes"], _peak_bytes())
            log["rms"].extend(np.asarray(update).tolist())
            log["curve"].append([start + each, float(program.evaluate(state[0], points)["loss"])])
            if not math.isfinite(log["curve"][-1][1]):
                break
            now = time.monotonic()
            stop = now + 1.5 * (now - begun) > until
            if saved and (stop or now > last_save + SAVE_EVERY):
                note_time()
                _save(saved, state, log)
                last_save = time.monotonic()
                if stop:
                    return None
        self.params = state[0]
        final = {k: float(x) for k, x in program.evaluate(state[0], last).items()}
        note_time()
        if saved:
            saved.unlink(missing_ok=True)
        losses, rms = log["loss"], log["rms"]
        return {
            "key": _rows.key_of(config),
            "config": config,
            **{name: number(x) for name, x in final.items()},
            "diverged": not final["loss"] < math.log(VOCABULARY),  # no better than chance
            "curve": [(step, number(loss)) for step, loss in log["curve"]],
            "train": _thinned(losses, each),
            "early_loss": [number(x) for x in losses[:EARLY]],
            "early_update_rms": [number(x) for x in rms[:EARLY]],
            "num_params": num_params,
            "state_bytes": sizes[1],
            "tokens": steps * config["batch"] * window,
            "seconds": round(log["seconds"], 2),
            "cpu_seconds": round(log["cpu_seconds"], 2),
            "commit": ", ".join(log["commits"]),
            **_about(checksum),
            **(_speed(log, each * config["batch"] * window) if self._speed else {}),
        }


def _save(path: pathlib.Path, state: Any, log: dict[str, Any]) -> None:
    """What was saved before goes only once this is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps((jax.device_get(jax.tree.leaves(state)), log)))
    new.replace(path)


def _about(corpus: int) -> _rows.Row:
    """By what, of which text, where and when a row was made."""
    return {
        "jax": importlib.metadata.version("jax"),
        "optax": importlib.metadata.version("optax"),
        "python": platform.python_version(),
        "corpus": corpus,
        "machine": _results.machine(jax.devices()[0].device_kind),
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
    }


def _peak_bytes() -> int:
    """The most that was in use on the first device since this process began; 0 if unknown."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def _speed(log: dict[str, Any], tokens: int) -> dict[str, float | None]:
    """Of training alone: the median twentieth of the run, which leaves out those that compiled."""
    return {
        "tokens_per_second": number(tokens / float(np.median(log["train_seconds"]))),
        "peak_bytes": log["peak_bytes"] or None,
    }


def number(x: float) -> float | None:
    """Five digits; None for what JSON cannot say."""
    return float(f"{x:.6g}") if math.isfinite(x) else None


def _thinned(losses: list[float], every: int) -> list[tuple[int, float | None]]:
    """Means of ``every`` steps, at their last step."""
    return [
        (i + every, number(float(np.mean(losses[i : i + every]))))
        for i in range(0, len(losses), every)
    ]


def sliced(batch: Any, size: int) -> Any:
    """(n, ...) to (n / size, size, ...)."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
