"""Where delayed updates train: asynchronous pipelines and PipeMare's corrections, on small models.

A chain of tanh stages that learns another such chain, and residual blocks that classify. Each stage
has the delay that a pipeline of P stages gives it: its gradient is taken at earlier parameters.
All variants train at all learning rates, with and without momentum, from the same seeds.

  python benchmarks/delayed_updates.py            # writes benchmarks/results/
  python benchmarks/delayed_updates.py --smoke    # few steps of two stages, prints only
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext

STAGES = (4, 8, 16)
RATES = tuple(0.005 * 2**k for k in range(7))  # 0.005 to 0.32
MOMENTA = (0.0, 0.9)
SEEDS = (0, 1)
STEPS = 500
BATCH = 16
HELD_OUT = 512
WIDTH = {"tanh": 12, "residual": 16}
INPUTS, CLASSES = 16, 8


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train a pipeline."""

    method: str = "pipemare"
    backward: str = "current"  # parameters of the backward pass: current, forward, corrected
    divides: bool = False  # T1


VARIANTS = {
    "synchronous": Variant("gpipe"),
    "PipeDream-2BW": Variant("pipedream_2bw", "forward"),
    "PipeDream (stashing, delay P - i)": Variant("pipedream", "forward"),
    "stashing": Variant(backward="forward"),
    "plain delay": Variant(),
    "T1": Variant(divides=True),
    "T2": Variant(backward="corrected"),
    "T1 and T2": Variant(backward="corrected", divides=True),
}


# --- The models -----------------------------------------------------------------------------------


@jax.custom_vjp
def linear(x: jax.Array, w: jax.Array, backward_w: jax.Array) -> jax.Array:
    """``x @ w``, whose cotangent of ``x`` is that of ``x @ backward_w``."""
    del backward_w
    return x @ w


linear.defvjp(
    lambda x, w, backward_w: (x @ w, (x, backward_w)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g, jnp.zeros_like(kept[1])),
)


def random_params(model: str, num_stages: int, key: jax.Array) -> dict:
    """Stages are stacked on dim 0; the input layer is in the first stage, the head in the last."""
    width = WIDTH[model]
    keys = jax.random.split(key, 3)

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / jnp.sqrt(shape[-2])

    stages = normal(keys[0], num_stages, width, width)
    if model == "tanh":
        return {"stages": {"w": jnp.eye(width)[None] + stages / 4}}
    return {
        "input": normal(keys[1], INPUTS, width),
        "stages": {"w": stages},
        "head": normal(keys[2], width, CLASSES) / 4,
    }


def outputs(params: dict, backward: dict, x: jax.Array) -> jax.Array:
    """The model, a stage after the other, with Jacobians at the backward parameters."""
    residual = "head" in params

    def stage(x: jax.Array, both: tuple[dict, dict]) -> tuple[jax.Array, None]:
        w, backward_w = both[0]["w"], both[1]["w"]
        if not residual:
            return jnp.tanh(linear(x, w, backward_w)), None
        scaled = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        return x + jnp.tanh(linear(scaled, w, backward_w)), None

    if residual:
        x = linear(x, params["input"], backward["input"])
    x, _ = jax.lax.scan(stage, x, (params["stages"], backward["stages"]))
    return linear(x, params["head"], backward["head"]) if residual else x


def loss_of(params: dict, backward: dict, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Squared error of the tanh chain, cross-entropy of the classifier."""
    x, y = batch
    out = outputs(params, backward, x)
    if "head" in params:
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()
    return jnp.sum((out - y) ** 2, axis=-1).mean()


class Task(NamedTuple):
    """What a run starts from and sees."""

    params: dict
    batches: tuple[jax.Array, jax.Array]  # [steps, batch, ...]
    held_out: tuple[jax.Array, jax.Array]


def task_of(model: str, num_stages: int, steps: int, seed: int) -> Task:
    """Random parameters, and examples that a teacher labels."""
    begin, below, above, data = jax.random.split(jax.random.key(seed), 4)
    num = steps * BATCH + HELD_OUT
    if model == "tanh":
        x = jax.random.normal(data, (num, WIDTH[model]))
        teacher = random_params(model, num_stages, below)
        y = jax.jit(outputs)(teacher, teacher, x)
    else:
        x = jax.random.normal(data, (num, INPUTS))
        hidden = jnp.tanh(x @ jax.random.normal(below, (INPUTS, 32)) / 4)
        y = jnp.argmax(hidden @ jax.random.normal(above, (32, CLASSES)), axis=-1)
    split = [(z[:-HELD_OUT].reshape(steps, BATCH, *z.shape[1:]), z[-HELD_OUT:]) for z in (x, y)]
    batches, held_out = zip(*split, strict=True)
    return Task(random_params(model, num_stages, begin), batches, held_out)


# --- Training -------------------------------------------------------------------------------------


def delays_of(method: str, num_stages: int, params: dict) -> dict:
    """The forward delay of every parameter in updates, with one micro-batch per update."""
    behind = np.arange(num_stages)[::-1]  # P - i
    forward = {
        "pipemare": 2 * behind + 1,
        "pipedream": behind,
        "pipedream_2bw": np.ones_like(behind),
        "gpipe": np.zeros_like(behind),
    }[method]
    of = {"input": forward[0], "stages": {"w": forward}, "head": forward[-1]}
    return {name: of[name] for name in params}


def delayed(history: dict, delays: dict) -> dict:
    """Each stage's parameters as they were its delay ago; ``history`` is newest first."""

    def of(versions: jax.Array, delay: np.ndarray) -> jax.Array:  # versions: [age, stages, ...]
        return versions[delay, np.arange(versions.shape[1])] if delay.ndim else versions[delay]

    return jax.tree.map(of, history, delays)


def final_loss(
    num_stages: int, variant: Variant, task: Task, rate: jax.Array, momentum: jax.Array
) -> jax.Array:
    """The held-out loss of the last parameters."""
    delays = delays_of(variant.method, num_stages, task.params)
    steps, oldest = len(task.batches[0]), max(int(x.max()) for x in jax.tree.leaves(delays))
    parts = [optax.sgd(rate, momentum)]
    parts += [optax_ext.scale_by_delay(delays, max(steps // 3, 1))] if variant.divides else []
    parts += [optax_ext.discrepancy_correction(delays)] if variant.backward == "corrected" else []
    tx = optax.chain(*parts)

    def step(carry: tuple, batch: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        params, history, state = carry
        forward, backward = delayed(history, delays), params
        if variant.backward == "forward":
            backward = forward
        elif variant.backward == "corrected":
            backward = optax_ext.backward_params(params, state)
        grads = jax.grad(loss_of)(forward, backward, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        history = jax.tree.map(lambda p, h: jnp.concatenate([p[None], h[:-1]]), params, history)
        return (params, history, state), None

    history = jax.tree.map(lambda p: jnp.stack([p] * (oldest + 1)), task.params)
    begin = task.params, history, tx.init(task.params)
    (params, *_), _ = jax.lax.scan(step, begin, task.batches)
    return loss_of(params, params, task.held_out)


def losses(
    model: str, num_stages: int, variant: Variant, steps: int, rates: tuple[float, ...]
) -> np.ndarray:
    """[momentum, rate] -> the mean over seeds; infinite where a run diverged."""
    tasks = [task_of(model, num_stages, steps, seed) for seed in SEEDS]
    tasks = jax.tree.map(lambda *x: jnp.stack(x), *tasks)
    over_seeds = jax.vmap(functools.partial(final_loss, num_stages, variant), (0, None, None))
    over_rates = jax.vmap(over_seeds, (None, 0, None))
    every = jax.jit(jax.vmap(over_rates, (None, None, 0)))
    found = every(tasks, jnp.asarray(rates), jnp.asarray(MOMENTA))
    return np.nan_to_num(np.mean(found, axis=-1), nan=np.inf, posinf=np.inf)


def initial_loss(model: str, num_stages: int) -> float:
    """The held-out loss before training."""
    tasks = [task_of(model, num_stages, 1, seed) for seed in SEEDS]
    return float(np.mean([loss_of(t.params, t.params, t.held_out) for t in tasks]))


# --- The table ------------------------------------------------------------------------------------


def cell(found: np.ndarray, rates: tuple[float, ...], initial: float) -> str:
    """The lowest loss with its rate, and the largest rate that trains."""
    best = int(np.argmin(found))
    if not found[best] < initial / 2:
        return "does not train"
    # No larger rate counts beyond one that fails: it would be luck.
    fails = np.flatnonzero(~(found[best:] < initial / 2))
    largest = best + (int(fails[0]) if fails.size else len(rates) - best) - 1
    return f"{found[best]:.2g} at {rates[best]:g}, to {rates[largest]:g}"


def rows(
    model: str, stages: tuple[int, ...], steps: int, rates: tuple[float, ...]
) -> Iterator[str]:
    """A row for each variant; columns are momenta and numbers of stages."""
    initial = {p: initial_loss(model, p) for p in stages}
    for name, variant in VARIANTS.items():
        found = {p: losses(model, p, variant, steps, rates) for p in stages}
        cells = [cell(found[p][i], rates, initial[p]) for i in range(len(MOMENTA)) for p in stages]
        yield f"| {name} | {' | '.join(cells)} |"
    begin = [f"{initial[p]:.2g}" for _ in MOMENTA for p in stages]
    yield f"| loss before training | {' | '.join(begin)} |"


def header(stages: tuple[int, ...]) -> str:
    """The columns."""
    names = [f"momentum {m:g}, P = {p}" for m in MOMENTA for p in stages]
    return f"| variant | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}"


def main() -> None:
    """Prints the tables, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps; writes no results")
    smoke = parser.parse_args().smoke
    stages, steps, rates = ((2,), 20, (0.01, 0.1)) if smoke else (STAGES, STEPS, RATES)
    tables = {
        model: _results.table(header(stages), rows(model, stages, steps, rates)) for model in WIDTH
    }
    if smoke:
        return
    about = (
        f"SGD, {STEPS} steps of {BATCH} fresh examples, one micro-batch per update, float32. "
        f"Each cell: the lowest held-out loss of the last parameters, mean of {len(SEEDS)} seeds, "
        f"with its learning rate among {', '.join(f'{r:g}' for r in RATES)}; then the largest rate "
        "up to which the loss ends below half of that before training. Stage i of P has a delay "
        "of 2 (P - i) + 1 updates in the lower five rows. T1 is annealed over the first third of "
        "the steps. These are small models without noise in their labels: they show where the "
        "update rules are stable, not how large models train."
    )
    titles = {
        "tanh": f"## A chain of P tanh stages of width {WIDTH['tanh']}: squared error",
        "residual": f"## P residual blocks of width {WIDTH['residual']}: cross-entropy, nats",
    }
    parts = [part for model in WIDTH for part in (titles[model], tables[model])]
    _results.write("delayed_updates", "Delayed updates", about, *parts)


if __name__ == "__main__":
    main()
