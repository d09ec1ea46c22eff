"""What a step costs with low-precision state: time on this CPU, and what programs for TPUs move.

Time: the update of matrices, each format beside float32 in one run, rounds interleaved. TPU: bytes
accessed and temporaries as the compiler reports them (needs libtpu: pip install 'optax-ext[aot]').

  python benchmarks/low_precision_cost.py            # writes benchmarks/results/
  python benchmarks/low_precision_cost.py --smoke    # small matrices, the CPU alone, prints only
"""

import argparse
import os
import time
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _steps import step_of
from jax.sharding import NamedSharding, PartitionSpec

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
    running = {}
    for key, tx in transformations(optimizers).items():
        params = jax.tree.map(jnp.ones_like, grads)
        state = jax.jit(tx.init)(params)
        start = time.perf_counter()
        compiled = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(params, state, grads).compile()
        running[key] = [compiled, params, state, time.perf_counter() - start, []]
    for _ in range(rounds):
        for one in running.values():
            start = time.perf_counter()
            one[1], one[2] = jax.block_until_ready(one[0](one[1], one[2], grads))
            one[4].append(time.perf_counter() - start)
    lines = [
        "| optimizer | state | ms, median | / float32, median (quartiles) | compiled in, s |",
        "|---|---|---|---|---|",
    ]
    for (name, fmt), (_, _, _, seconds, times) in running.items():
        ratios = np.array(times) / np.array(running[name, "float32"][4])
        low, middle, high = np.percentile(ratios, (25, 50, 75))
        lines.append(
            f"| {name} | {fmt} | {1e3 * np.median(times):.1f} "
            f"| {middle:.2f} ({low:.2f}-{high:.2f}) | {seconds:.1f} |"
        )
    return "\n".join(lines)


def tpu_table(target: str, size: int, matrices: int) -> str:
    """Bytes that a compiled update accesses on one chip."""
    mesh = shd.targets.mesh(target, (1,), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(tree: object) -> object:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)

    params = {f"w{i}": jax.ShapeDtypeStruct((size, size), jnp.float32) for i in range(matrices)}
    count = matrices * size**2
    lines = [
        "| optimizer | state | bytes accessed, a parameter | temporaries, a parameter |"
        " compiled in, s |",
        "|---|---|---|---|---|",
    ]
    for (name, fmt), tx in transformations().items():
        state = jax.eval_shape(tx.init, params)
        lowered = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(
            place(params), place(state), place(params)
        )
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        moved = sum(shd.audit(compiled).nbytes.values()) / count
        held = compiled.memory_analysis().temp_size_in_bytes / count
        lines.append(f"| {name} | {fmt} | {moved:.1f} | {held:.2f} | {seconds:.0f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Prints the tables; keeps those of whole size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small, the CPU alone; no file")
    smoke = parser.parse_args().smoke
    if smoke:
        print(cpu_table(64, 1, 3, ["adamw"]))
        return
    cpu = cpu_table(1024, 8, 30)
    print(cpu)
    tpu = tpu_table("v5e:1x1", 4096, 4)
    cores = len(os.sched_getaffinity(0))
    parts = [
        f"Update of 8 matrices of 1024 x 1024 on {cores} core(s) of this CPU, 30 rounds",
        cpu,
        "Update of 4 matrices of 4096 x 4096, compiled for one v5e chip",
        tpu,
    ]
    _results.write("low_precision_cost", "Cost of low-precision state", "", *parts)


if __name__ == "__main__":
    main()
