"""Steps as benchmarks compile them: of an optimizer, of a loss; and how they are timed in turns."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import sharding as shd
from optax_ext import kernels
from sharding.plan import targets

Shapes = Sequence[tuple[int, ...]]


def step_of(tx: optax.GradientTransformation) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """From parameters, state and gradients to new parameters and state, as ``Zero`` makes them."""
    update_params = kernels.update_params_of(tx)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        if update_params is not None:
            return update_params(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def lowered(
    target: str, tx: optax.GradientTransformation, shapes: Shapes, dtype: Any = jnp.float32
) -> jax.stages.Lowered:
    """The step of float32 arrays on one device of the target, its arguments donated.

    Gradients have this dtype.
    """
    mesh = shd.targets.mesh(target, (1,), ("data",))
    place = NamedSharding(mesh, PartitionSpec())

    def on_device(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    def step(params: list, state: Any, grads: list) -> tuple:
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return step_of(tx)(params, state, wide)

    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    grads = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    state = jax.eval_shape(tx.init, params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(
        on_device(params), on_device(state), on_device(grads)
    )


def zero_on(target: str, **options: Any) -> shd.Zero:
    """On all devices of a target, along its links."""
    axes = targets.parse(target).mesh_axes
    mesh = targets.mesh(target, tuple(axes.values()), tuple(axes))
    return shd.Zero(mesh, axis=tuple(axes), **options)


def jitted_step(loss: Callable[..., Any], tx: Any, state: Any) -> Any:
    """A user's step by ``jit`` alone, whose results stay where the state, real or abstract, is."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    of_state = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(of_state, None))


def compiled(*arguments: Any) -> jax.stages.Compiled:
    """The result of ``lowered``, compiled."""
    return lowered(*arguments).compile()


def cost(program: jax.stages.Compiled, shapes: Shapes) -> tuple[float, float]:
    """Bytes a parameter that a program accesses in main memory, and bytes of its temporaries."""
    size = sum(math.prod(s) for s in shapes)
    moved = sum(shd.audit(program).nbytes.values()) / size
    return moved, program.memory_analysis().temp_size_in_bytes / size


def replacing(fn: Callable[..., Any], held: list, *inputs: Any) -> Callable[[], None]:
    """A call of ``fn`` that replaces its first arguments by its first results."""

    def call() -> None:
        held[:] = fn(*held, *inputs)[: len(held)]
        jax.block_until_ready(held)

    return call


def time_alternately(
    steps: Mapping[Any, Callable[[], None]], rounds: int, warm_up: int = 2
) -> dict[Any, np.ndarray]:
    """The seconds of each step in each round; those of the first rounds are not counted.

    Each round has an order of its own: the step before affects caches and allocator.
    """
    rng = np.random.default_rng(0)
    times: dict[Any, list[float]] = {name: [] for name in steps}
    for i in range(rounds + warm_up):
        for j in rng.permutation(len(steps)):
            name = list(steps)[j]
            start = time.perf_counter()
            steps[name]()
            if i >= warm_up:
                times[name].append(time.perf_counter() - start)
    return {name: np.array(found) for name, found in times.items()}


def quartiles(ratios: np.ndarray) -> str:
    """The median and the quartiles."""
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"
