"""The cost of a step with low-precision state: time on this CPU, and bytes that TPU programs move.

Time: the update of matrices, each format beside float32 in one run, rounds interleaved. TPU: bytes
accessed and temporaries as the compiler reports them (needs libtpu: pip install '.[aot]').
First step: CPU seconds until an update of many arrays is compiled, which a cache would hide.

  python benchmarks/low_precision_cost.py            # writes benchmarks/results/
  python benchmarks/low_precision_cost.py --smoke    # small matrices, the CPU alone, prints only
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _steps import cost, lowered, quartiles, replacing, step_of, time_alternately

import optax_ext
import sharding as shd

OPTIMIZERS = {"adamw": optax.adamw(1e-3), "came": optax_ext.came(1e-3)}
FORMATS = {
    "float32": None,
    "bfloat16": (16, "stochastic"),
    "8bit": (8, "stochastic"),
    "8bit nearest": (8, "nearest"),
    "8bit compensated": (8, "compensated"),
    "fp8": (optax_ext.Float8(), "stochastic"),
    "4bit": (4, "stochastic"),
}


def transformations(
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
) -> dict[tuple[str, str], optax.GradientTransformation]:
    """By optimizer and format."""
    return {
        (name, fmt): tx
        if options is None
        else optax_ext.low_precision_state(tx, options[0], rounding=options[1])
        for name, tx in ((name, OPTIMIZERS[name]) for name in optimizers)
        for fmt, options in FORMATS.items()
    }


def cpu_table(
    size: int, matrices: int, rounds: int, optimizers: Sequence[str] = tuple(OPTIMIZERS)
) -> str:
    """Times of an update on this machine, against float32."""
    grads = {f"w{i}": jnp.full((size, size), 0.01) for i in range(matrices)}
    steps, seconds = {}, {}
    for key, tx in transformations(optimizers).items():
        params = jax.tree.map(jnp.ones_like, grads)
        held = [params, jax.jit(tx.init)(params)]
        start = time.perf_counter()
        step = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(*held, grads).compile()
        seconds[key] = time.perf_counter() - start
        steps[key] = replacing(step, held, grads)
    times = time_alternately(steps, rounds)

    def row(key: tuple[str, str]) -> str:
        return (
            f"| {' | '.join(key)} | {1e3 * np.median(times[key]):.1f} "
            f"| {quartiles(times[key] / times[key[0], 'float32'])} | {seconds[key]:.1f} |"
        )

    return _results.table(
        "| optimizer | state | ms, median | / float32, median (quartiles) | compiled in, s |\n"
        "|---|---|---|---|---|",
        map(row, steps),
    )


def tpu_table(target: str, size: int, matrices: int) -> str:
    """Bytes that a compiled update accesses on one chip."""
    shapes = [(size, size)] * matrices

    def rows() -> Iterator[str]:
        for (name, fmt), tx in transformations().items():
            step = lowered(target, tx, shapes)
            start = time.perf_counter()
            program = step.compile()
            seconds = time.perf_counter() - start
            moved, held = cost(program, shapes)
            yield f"| {name} | {fmt} | {moved:.1f} | {held:.2f} | {seconds:.0f} |"

    return _results.table(
        "| optimizer | state | bytes accessed, a parameter | temporaries, a parameter |"
        " compiled in, s |\n|---|---|---|---|---|",
        rows(),
    )


EIGHT_BITS = {
    "adamw": optax_ext.adamw8bit(1e-3),
    "adam": optax_ext.low_precision_state(optax.adam(1e-3)),
    "lion": optax_ext.lion8bit(1e-3),
    "came": optax_ext.came8bit(1e-3),
}
# Vocabularies, layers of a 7B Llama and stacks of them, with the numbers of devices: of several,
# each has rows, columns, or rows that end within a block.
ARRAYS = {
    "32000 x 4096": ((32000, 4096), 1),
    "151936 x 4096": ((151936, 4096), 1),
    "50257 x 768": ((50257, 768), 1),
    "4096 x 11008": ((4096, 11008), 1),
    "8 x 4096 x 4096": ((8, 4096, 4096), 1),
    "32000 x 4096, 4000 rows of it": ((32000, 4096), 8),
    "50257 x 768, 96 columns of it": ((50257, 768), 8),
    "151936 x 4096, 2374 rows of it": ((151936, 4096), 64),
}


def shard_cost(
    target: str, tx: optax.GradientTransformation, shape: tuple[int, ...]
) -> tuple[float, float]:
    """``cost`` of the update of a shard, by ZeRO on all devices of a target."""
    num = shd.targets.parse(target).num_devices
    zero = shd.Zero(shd.targets.mesh(target, (num,), ("data",)), stage=3)

    def state() -> tuple[Any, Any]:
        params = jnp.zeros(shape)
        return params, tx.init(params)

    placed = zero.abstract_state(state, tx=tx)
    step = jax.jit(lambda state, grads: zero.apply_gradients(state, grads, tx=tx), donate_argnums=0)
    moved, held = cost(step.lower(placed, placed[0]).compile(), [shape])
    return num * moved, num * held


def arrays_table(chip: str, optimizers: Sequence[str]) -> str:
    """Bytes that updates of one array in 8 bits access, and their temporaries."""
    slices = {1: "1x1", 8: "2x4", 64: "8x8"} if chip != "v5p" else {1: "1x1x1", 8: "2x2x2"}

    def row(name: str, num: int, shape: tuple[int, ...]) -> str:
        target, cells = f"{chip}:{slices[num]}", []
        for tx in (EIGHT_BITS[optimizer] for optimizer in optimizers):
            if num == 1:
                moved, held = cost(lowered(target, tx, [shape]).compile(), [shape])
            else:
                moved, held = shard_cost(target, tx, shape)
            cells.append(f"{moved:.1f} ({held:.2f})")
        return f"| {name} | {' | '.join(cells)} |"

    return _results.table(
        f"| array | {' | '.join(optimizers)} |\n|---|{'---|' * len(optimizers)}",
        (row(k, *reversed(v)) for k, v in ARRAYS.items() if v[1] in slices),
    )


def gpt2_shapes(layers: int = 12, width: int = 768) -> list[tuple[int, ...]]:
    """Of GPT-2's parameters: 148 arrays, 50 of them matrices."""
    matrices = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    vectors = [(width,)] * 6 + [(3 * width,), (4 * width,)]
    return [(50257, width), (1024, width), (width,), (width,)] + (matrices + vectors) * layers


def first_step_table(
    shapes: Sequence[tuple[int, ...]], optimizers: Sequence[str] = tuple(OPTIMIZERS)
) -> str:
    """CPU time of tracing, lowering and compiling an update."""
    jax.config.update("jax_enable_compilation_cache", False)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def rows() -> Iterator[str]:
        sums: dict[str, float] = {}
        for (name, fmt), tx in transformations(optimizers).items():
            state, times = jax.eval_shape(tx.init, params), [time.process_time()]
            lowered_step = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(params, state, params)
            times.append(time.process_time())
            lowered_step.compile()
            times.append(time.process_time())
            total = times[2] - times[0]
            ratio = total / sums.setdefault(name, total)
            lower, compiled = np.diff(times)
            yield f"| {name} | {fmt} | {lower:.2f} | {compiled:.2f} | {total:.2f} | {ratio:.1f} |"

    return _results.table(
        "| optimizer | state | traced and lowered in, s | compiled in, s | sum | / float32 |\n"
        "|---|---|---|---|---|---|",
        rows(),
    )


def main() -> None:
    """Prints the tables; writes those of full size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small, the CPU alone; no file")
    smoke = parser.parse_args().smoke
    if smoke:
        cpu_table(64, 1, 3, ["adamw"])
        first_step_table([(64, 64)], ["adamw"])
        return
    cpu = cpu_table(1024, 8, 30)
    tpu = tpu_table("v5e:1x1", 4096, 4)
    first = first_step_table(gpt2_shapes())
    cores = len(os.sched_getaffinity(0))
    parts = [
        f"Update of 8 matrices of 1024 x 1024 on {cores} core(s) of this CPU, 30 rounds",
        cpu,
        "Update of 4 matrices of 4096 x 4096, compiled for one v5e chip",
        tpu,
        "CPU seconds of the first step with the 148 arrays of GPT-2, of which 50 are matrices",
        first,
    ]
    for chip in ("v5e", "v5p", "v6e"):
        of = tuple(EIGHT_BITS) if chip == "v5e" else ("adamw", "lion")
        parts += [
            f"Update of one array in 8 bits on {chip}: bytes a parameter (temporaries)",
            arrays_table(chip, of),
        ]
    _results.write("low_precision_cost", "Cost of low-precision state", "", *parts)


if __name__ == "__main__":
    main()
