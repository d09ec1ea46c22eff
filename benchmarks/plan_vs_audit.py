"""The planner beside the auditor: planned and compiled memory and traffic, model by model.

Arguments (parameters, optimizer state, batch) as planned in closed form, over those of the compiled
step; and bytes sent over those planned. TPU targets need libtpu, GPU targets jax's CUDA
plugin: pip install 'optax-ext[aot]'. Nothing is run.

  python benchmarks/plan_vs_audit.py            # prints the table, writes benchmarks/results/
  python benchmarks/plan_vs_audit.py --smoke    # gpt2-small on 8 virtual CPU devices, prints only
"""

import argparse
import dataclasses
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import optax

import optax_ext
import sharding as shd
from sharding.plan import MODELS, estimate, kind_of, targets

MIB = 2**20
LENGTH = 512
TARGETS = ("cpu:8", "h200x8", "v5p:4x4x4")
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax_ext.adafactor(1e-3),
    "came": lambda: optax_ext.came(1e-3),
    "came, master weights": lambda: optax_ext.master_weights(optax_ext.came(1e-3)),
}
HEADER = """\
| model | target | optimizer | stage | arguments, MiB | / planned | sent, MiB | / planned |\
 temporaries, MiB | compiled in, s |
|---|---|---|---|---|---|---|---|---|---|"""


def row(name: str, target: str, optimizer: str, stage: int) -> str:
    """A line of the table: one step, planned and compiled."""
    model = dataclasses.replace(MODELS[name], length=LENGTH)
    dtype = jnp.float32 if target.startswith("cpu") else jnp.bfloat16  # XLA:CPU widens sums
    tx = OPTIMIZERS[optimizer]()
    axes = targets.parse(target).mesh_axes
    mesh = targets.mesh(target, tuple(axes.values()), tuple(axes))
    zero = shd.Zero(mesh, stage, tuple(axes))
    plan = estimate(
        model.abstract(dtype),
        tx,
        zero,
        batch=4 * (LENGTH + 1),
        device=kind_of(target),
        gathered_once=model.gathered_once,
    )
    planned = plan.stage(plan.requested)
    layer = zero.gathered(model.apply_layer)

    def make_state() -> Any:
        params = model.init(dtype)
        return params, tx.init(params)

    step = zero.train_step(model.make_loss(layer if stage == 3 else jax.checkpoint(layer)), tx=tx)
    batch = jax.ShapeDtypeStruct((zero.num_devices, LENGTH + 1), jnp.int32)
    lowered = step.lower(zero.abstract_state(make_state, tx=tx), batch)
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return f"| {name} | {target} | {optimizer} | {stage} | does not fit |{' |' * 5}"
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    wire = shd.wire_bytes(compiled)
    return (
        f"| {name} | {target} | {optimizer} | {stage} "
        f"| {memory.argument_size_in_bytes / MIB:.1f} "
        f"| {memory.argument_size_in_bytes / planned.arguments:.4f} "
        f"| {wire / MIB:.1f} | {wire / planned.wire:.4f} "
        f"| {memory.temp_size_in_bytes / MIB:.1f} | {seconds:.0f} |"
    )


def rows(smoke: bool) -> Iterator[str]:
    """All lines."""
    for name in ["gpt2-small"] if smoke else ["gpt2-small", "llama2-7b"]:
        for target in ["cpu:8"] if smoke else TARGETS:
            for optimizer in ["came"] if smoke else OPTIMIZERS:
                for stage in [1, 3] if smoke else range(4):
                    yield row(name, target, optimizer, stage)


def main() -> None:
    """Prints the table; writes that of all targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two steps on cpu:8; no file")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_num_cpu_devices", 8)
    table = _results.table(HEADER, rows(smoke))
    if not smoke:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        about = (
            f"Sequences of {LENGTH} tokens, one a device. The process held at most {peak:.1f} GiB."
        )
        _results.write("plan_vs_audit", "Planned and compiled", about, table)


if __name__ == "__main__":
    main()
