"""What pipelines hold, send and compute, read from programs for compile-only targets.

A decoder-only transformer (bfloat16 on accelerators, float32 on CPU) on 4 stages and 2 devices of
data parallelism, ZeRO stage 1, AdamW, by every schedule. TPU targets need libtpu, GPU targets jax's
CUDA plugin.

  python benchmarks/pipelines.py               # prints the tables, writes results/pipelines.md
  python benchmarks/pipelines.py --smoke       # virtual CPU devices and two schedules, prints only
  python benchmarks/pipelines.py --target cpu:8 --target h200x8
"""

import argparse
import dataclasses
import functools
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import optax
from _transformer import Config, apply_block, init

import sharding as shd
from sharding.pipeline import Costs, Schedule
from sharding.plan import targets
from sharding.plan._wire import collectives

MIB = 2**20
STAGES, LENGTH = 4, 512
TARGETS = ("cpu:8", "v5e:2x4", "h200x8")
SCHEDULES = {
    "gpipe": shd.pipeline.gpipe,
    "1f1b": functools.partial(shd.pipeline.one_f_one_b, aligned=False),
    "1f1b-aligned": shd.pipeline.one_f_one_b,
    "interleaved-aligned": shd.pipeline.interleaved,
    "zb-h1": shd.pipeline.zb_h1,
    "zb-v": shd.pipeline.zb_v,
    "chimera": shd.pipeline.chimera,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step to compile."""

    target: str
    schedule: str
    microbatches: int
    recompute: bool = True

    @property
    def config(self) -> Config:
        """The model; a small one for CPUs, where the tests compile it."""
        width = 64 if self.target.startswith("cpu") else 1024
        return Config(layers=8, width=width, heads=width // 64, vocabulary=8 * width)

    @property
    def dtype(self) -> Any:
        """Of parameters and activations."""
        return jnp.float32 if self.target.startswith("cpu") else jnp.bfloat16

    @property
    def table(self) -> Schedule:
        """The schedule."""
        return SCHEDULES[self.schedule](STAGES, self.microbatches)

    @property
    def activation(self) -> int:
        """Bytes of one message: a sequence of activations."""
        return LENGTH * self.config.width * jnp.dtype(self.dtype).itemsize


def head(shared: Any, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of the cross entropies of the next token, and their number."""
    logits = (x * shared["norm"][None, None]) @ shared["embed"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    return losses.sum(), jnp.asarray(losses.size, jnp.float32)


def compile_step(case: Case) -> Any:
    """The compiled training step."""
    mesh = targets.mesh(case.target, (2, STAGES), ("data", "pipe"))
    config, tx = case.config, optax.adamw(1e-3)
    pipeline = shd.Pipeline(
        mesh,
        case.table,
        num_layers=config.layers,
        embed=lambda shared, tokens: shared["embed"][tokens[:, :-1]],
        block=lambda layer, x, _: apply_block(layer, x),
        head=head,
        layers="blocks",
        recompute=case.recompute,
    )

    def make_state() -> tuple[Any, Any]:
        params = pipeline.stack(init(config, case.dtype))
        return params, tx.init(params)

    zero = shd.Zero(mesh, stage=1)
    specs = pipeline.param_specs(jax.eval_shape(make_state)[0])
    state = zero.abstract_state(make_state, tx=tx, param_specs=specs)
    step = zero.train_step(pipeline.loss, tx=tx, weighted=True)
    batch = jax.ShapeDtypeStruct((2 * case.microbatches, LENGTH + 1), jnp.int32)
    return step.lower(state, batch).compile()


def row(case: Case) -> str:
    """One line of the table."""
    compiled, table = compile_step(case), case.table
    figures = table.check()
    found = collectives(compiled)
    size = LENGTH * case.config.width
    permutes = [c for c in found if c.op == "collective-permute" and c.elements == size]
    others = sum(c.wire_bytes for c in found) - sum(c.wire_bytes for c in permutes)
    # In units of a stage's forward pass; a recomputing backward pass takes three of them.
    part, backward = table.num_stages / table.num_virtual_stages, 3 if case.recompute else 2
    costs = Costs(part, part * backward)
    if table.splits_backward:
        costs = Costs(part, part * (backward - 1), part)
    memory = compiled.memory_analysis()
    cells = (
        case.target,
        case.schedule,
        case.microbatches,
        "yes" if case.recompute else "no",
        f"{memory.temp_size_in_bytes / MIB:.2f}",
        max(figures.live),
        f"{sum(p.runs for p in permutes)}",
        max(figures.messages),
        f"{sum(p.wire_bytes for p in permutes) / MIB:.1f}",
        f"{others / MIB:.1f}",
        f"{table.lockstep_time(costs):.1f}",
        f"{table.event_time(costs):.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


COLUMNS = (
    *("target", "schedule", "micro-batches", "recompute", "temporaries, MiB", "live", "permutes"),
    *("needed", "permuted, MiB", "other wire, MiB", "lockstep time", "event time"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def main() -> None:
    """Prints the table, and writes it unless something was left out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="two schedules on CPU; prints only")
    parser.add_argument("--target", action="append", choices=TARGETS, help="[all]")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    if options.smoke:
        cases = [Case("cpu:8", name, 4) for name in ("gpipe", "1f1b-aligned")]
    else:
        cases = [
            Case(target, name, microbatches, recompute)
            for target in options.target or TARGETS
            for microbatches, recompute in ((8, True), (32, True), (8, False))
            for name in SCHEDULES
        ]
    table = _results.table(HEADER, map(row, cases))
    if not (options.smoke or options.target):
        activations = " and ".join(
            f"{Case(t, 'gpipe', 8).activation / MIB:g} MiB ({t})" for t in TARGETS
        )
        about = (
            f"8 layers on {STAGES} stages x 2 data-parallel devices, ZeRO stage 1, AdamW; "
            f"sequences of {LENGTH} tokens, one a micro-batch. One message is {activations}. "
            "*live*: the most activations that a stage stores by the schedule. *permutes*: that a "
            "device runs in a step; *needed*: the most that a stage has to send. Times in units of "
            "a stage's forward pass: a tick takes as long as its slowest stage (*lockstep*), or "
            "each operation starts when its inputs are there (*event*)."
        )
        _results.write("pipelines", "Pipelines: memory, messages and time", about, table)


if __name__ == "__main__":
    main()
