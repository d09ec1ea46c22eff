"""The planner beside the auditor: planned and compiled memory and traffic, model by model.

One table has arguments (parameters, optimizer state, batch) and bytes sent by optimizer, the other
all memory by stage and micro-batches: compiled, and over what is planned in closed form. TPU
targets need libtpu, GPU targets jax's CUDA plugin: pip install '.[aot]'. Nothing is run.

  python benchmarks/plan_vs_audit.py            # prints the tables, writes benchmarks/results/
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
from _steps import zero_on

import optax_ext
import sharding as shd
from sharding.plan import (
    MODELS,
    Decoder,
    activations_of,
    audit,
    estimate,
    kind_of,
    layer_costs,
)
from sharding.plan.audit._audit import Audit
from sharding.plan.cost._stage_plan import StagePlan

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


MEMORY_HEADER = """\
| model | target | stage | micro-batches | memory, MiB | / planned | arguments, MiB | / planned |\
 temporaries, MiB | / planned | planned at | gradients | activations | working | gathered |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def planned(
    model: Decoder, tx: Any, zero: shd.Zero, device: Any, dtype: Any, microbatches: int
) -> StagePlan:
    """The plan of a step of one sequence in each micro-batch, whose layers are computed again."""
    activations = None
    if device is not None:
        costs = layer_costs(model, device, dtype=dtype)
        activations = activations_of(model, device, costs)
    found = estimate(
        *(model.abstract(dtype), tx, zero),
        microbatches=microbatches,
        batch=4 * microbatches * (model.length + 1),
        device=device,
        gathered_once=model.gathered_once,
        activations=activations,
    )
    return found.stage(found.requested)


def step_of(
    name: str, target: str, tx: Any, stage: int, length: int | None = None, microbatches: int = 1
) -> tuple[StagePlan, Any]:
    """A step as planned, and lowered."""
    model = MODELS[name]
    model = dataclasses.replace(model, length=length or model.length)
    dtype = jnp.float32 if target.startswith("cpu") else jnp.bfloat16  # XLA:CPU widens sums
    zero = zero_on(target, stage=stage)
    layer = zero.gathered(model.apply_layer)
    loss = model.make_loss(layer if stage == 3 else jax.checkpoint(layer))

    def make_state() -> Any:
        params = model.init(dtype)
        return params, tx.init(params)

    step = zero.train_step(loss, tx=tx, microbatches=microbatches)
    state = zero.abstract_state(make_state, tx=tx)
    lowered = step.lower(state, model.batch(microbatches * zero.num_devices))
    return planned(model, tx, zero, kind_of(target), dtype, microbatches), lowered


def row(name: str, target: str, optimizer: str, stage: int) -> str:
    """A line of the first table: one step, planned and compiled."""
    plan, lowered = step_of(name, target, OPTIMIZERS[optimizer](), stage, LENGTH)
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
        f"| {memory.argument_size_in_bytes / plan.arguments:.4f} "
        f"| {wire / MIB:.1f} | {wire / plan.wire:.4f} "
        f"| {memory.temp_size_in_bytes / MIB:.1f} | {seconds:.0f} |"
    )


def memory_row(name: str, target: str, stage: int, microbatches: int) -> str:
    """A line of the second table: the memory of one step with AdamW."""
    options: Any = {"microbatches": microbatches}
    plan, lowered = step_of(name, target, optax.adamw(1e-3), stage, **options)
    found = audit(lowered, device=kind_of(target))
    return memory_line(name, target, stage, microbatches, plan, found)


def memory_line(
    name: str, target: str, stage: int, microbatches: int, plan: StagePlan, found: Audit
) -> str:
    """Compiled over planned: all memory, arguments, and what is beside them."""
    arguments = sum(found.arguments.values())
    pairs = [
        (found.memory, plan.peak),
        (arguments, plan.arguments),
        (found.memory - arguments, plan.peak - plan.arguments),
    ]
    figures = [f"| {mine / MIB:,.0f} | {mine / other:.3f}" for mine, other in pairs]
    moment = max(plan.moments, key=lambda name: sum(plan.moments[name].values()))
    parts = plan.moments[moment]
    names = ("gradients", "activations", "temporaries", "gathered")
    beside = " ".join(f"| {parts[part] / MIB:,.0f}" for part in names)
    start = f"| {name} | {target} | {stage} | {microbatches} "
    return f"{start}{' '.join(figures)} | {moment} {beside} |"


def rows(smoke: bool) -> Iterator[str]:
    """All lines of the first table."""
    for name in ["gpt2-small"] if smoke else ["gpt2-small", "llama2-7b"]:
        for target in ["cpu:8"] if smoke else TARGETS:
            for optimizer in ["came"] if smoke else OPTIMIZERS:
                for stage in [1, 3] if smoke else range(4):
                    yield row(name, target, optimizer, stage)


def memory_rows(smoke: bool) -> Iterator[str]:
    """All lines of the second table."""
    for target in ["cpu:8"] if smoke else ["h100x8", "v5p:2x2x2"]:
        for name in ["gpt2-small"] if smoke else ["gpt2-small", "llama2-7b"]:
            for microbatches in [2] if smoke else [1, 4]:
                for stage in [3] if smoke else range(4):
                    yield memory_row(name, target, stage, microbatches)


def main() -> None:
    """Prints the table; writes that of all targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two steps on cpu:8; no file")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_num_cpu_devices", 8)
    table = _results.table(HEADER, rows(smoke))
    memory = _results.table(MEMORY_HEADER, memory_rows(smoke))
    if not smoke:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        about = (
            f"First sequences of {LENGTH} tokens, one a device; then AdamW, with sequences of the "
            f"model's length, one in each micro-batch. The process held at most {peak:.1f} GiB."
        )
        _results.write("plan_vs_audit", "Planned and compiled", about, table, memory)


if __name__ == "__main__":
    main()
