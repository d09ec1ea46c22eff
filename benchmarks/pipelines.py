"""What pipelines hold, send and compute, read from programs for compile-only targets.

A decoder-only transformer (bfloat16 on accelerators, float32 on CPU) on 4 stages and 2 devices of
data parallelism, ZeRO stage 1, AdamW, by every schedule; then asynchronous pipelines on the same
devices. TPU targets need libtpu, GPU targets jax's CUDA plugin.

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
from sharding.plan.audit._hlo import Program
from sharding.plan.audit._program_collectives import collectives
from sharding.plan.audit._program_costs import costs

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


ASYNCHRONOUS = {
    "pipedream": lambda stages, microbatches, updates: shd.pipeline.pipedream(stages, updates),
    "pipedream-2bw": shd.pipeline.pipedream_2bw,
    "pipemare": shd.pipeline.pipemare,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step to compile, or a run of an asynchronous pipeline."""

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

    def run(self, updates: int) -> shd.pipeline.AsyncSchedule:
        """The schedule of an asynchronous pipeline."""
        return ASYNCHRONOUS[self.schedule](STAGES, self.microbatches, updates)

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


def make_pipeline(case: Case, mesh: Any, table: Schedule) -> shd.Pipeline:
    """The model on the stages."""
    return shd.Pipeline(
        mesh,
        table,
        num_layers=case.config.layers,
        embed=lambda shared, tokens: shared["embed"][tokens[:, :-1]],
        block=lambda layer, x, _: apply_block(layer, x),
        head=head,
        layers="blocks",
        recompute=case.recompute,
    )


def compile_step(case: Case) -> Any:
    """The compiled training step."""
    mesh = targets.mesh(case.target, (2, STAGES), ("data", "pipe"))
    config, tx = case.config, optax.adamw(1e-3)
    pipeline = make_pipeline(case, mesh, case.table)

    def make_state() -> tuple[Any, Any]:
        params = pipeline.stack(init(config, case.dtype))
        return params, tx.init(params)

    zero = shd.Zero(mesh, stage=1)
    specs = pipeline.param_specs(jax.eval_shape(make_state)[0])
    state = zero.abstract_state(make_state, tx=tx, param_specs=specs)
    step = zero.train_step(pipeline, tx=tx)
    batch = jax.ShapeDtypeStruct((2 * case.microbatches, LENGTH + 1), jnp.int32)
    return step.lower(state, batch).compile()


def untied_head(shared: Any, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``head`` with a matrix of its own."""
    return head({**shared, "embed": shared["head"]}, x, tokens)


def compile_run(case: Case, updates: int) -> Any:
    """The compiled run of an asynchronous pipeline."""
    mesh = targets.mesh(case.target, (2, STAGES), ("data", "pipe"))
    table = shd.pipeline.one_f_one_b(STAGES, 1)
    pipeline = dataclasses.replace(make_pipeline(case, mesh, table), head=untied_head)
    training = shd.AsyncPipeline(pipeline, case.run(updates), optax.adamw(1e-3))

    def make_state() -> Any:
        params = init(case.config, case.dtype)
        return training.init(pipeline.stack(params | {"head": params["embed"]}))

    def over_stages(path: Any, x: Any) -> Any:
        names = {getattr(key, "key", getattr(key, "name", None)) for key in path}
        spec = jax.P("pipe") if names & {"blocks", "opt_state"} else jax.P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

    state = jax.tree_util.tree_map_with_path(over_stages, jax.eval_shape(make_state))
    batches = jax.ShapeDtypeStruct(
        (updates, case.microbatches, 2, LENGTH + 1),
        jnp.int32,
        sharding=jax.NamedSharding(mesh, jax.P(None, None, "data")),
    )
    return jax.jit(training.run, donate_argnums=0).lower(state, batches).compile()


def flops_of_branches(compiled: Any) -> float:
    """Operations in matrix products, of each branch of the loops over ticks once."""
    program = Program(compiled.as_text())
    names = [
        name
        for table in program.computations.values()
        for it in table.values()
        if it.op == "conditional"
        for name in it.called
    ]
    return sum(cost.matmul_flops for name in names for cost in costs(program, name)[0])


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
        f"{flops_of_branches(compiled) / 1e9:.2f}",
        f"{table.lockstep_time(costs):.1f}",
        f"{table.event_time(costs):.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


COLUMNS = (
    *("target", "schedule", "micro-batches", "recompute", "temporaries, MiB", "live", "permutes"),
    *("needed", "permuted, MiB", "other wire, MiB", "GFLOP", "lockstep time", "event time"),
)


def row_of_run(case: Case, updates: int = 16) -> str:
    """One line of the table of asynchronous pipelines."""
    compiled, table = compile_run(case, updates), case.run(updates)
    figures, size = table.check(), LENGTH * case.config.width
    permutes = [c for c in collectives(compiled) if c.op == "collective-permute"]
    costs = Costs(1, 3)
    each = case.run(2 * updates).lockstep_time(costs) - table.lockstep_time(costs)
    flushed = shd.pipeline.one_f_one_b(STAGES, case.microbatches).lockstep_time(costs)
    cells = (
        case.target,
        case.schedule,
        case.microbatches,
        f"{compiled.memory_analysis().temp_size_in_bytes / MIB:.2f}",
        max(figures.weight_versions),
        max(figures.live),
        f"{sum(p.runs for p in permutes if p.elements == size) / updates:.1f}",
        f"{each / updates:.1f}",
        f"{flushed:.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


COLUMNS_OF_RUNS = (
    *("target", "schedule", "micro-batches", "temporaries, MiB", "versions", "live", "permutes"),
    *("lockstep time", "1F1B with flushes"),
)


def header(columns: tuple[str, ...]) -> str:
    """The first two lines of a table."""
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


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
        runs = [Case("cpu:8", "pipedream-2bw", 4)]
    else:
        cases = [
            Case(target, name, microbatches, recompute)
            for target in options.target or TARGETS
            for microbatches, recompute in ((8, True), (32, True), (8, False))
            for name in SCHEDULES
        ]
        runs = [
            Case(target, name, 1 if name == "pipedream" else 8)
            for target in options.target or TARGETS
            for name in ASYNCHRONOUS
        ]
    table = _results.table(header(COLUMNS), map(row, cases))
    of_runs = _results.table(header(COLUMNS_OF_RUNS), map(row_of_run, runs))
    if not (options.smoke or options.target):
        activations = " and ".join(
            f"{Case(t, 'gpipe', 8).activation / MIB:g} MiB ({t})" for t in TARGETS
        )
        about = (
            f"8 layers on {STAGES} stages x 2 data-parallel devices, ZeRO stage 1, AdamW; "
            f"sequences of {LENGTH} tokens, one a micro-batch. One message is {activations}. "
            "*live*: the most activations that a stage stores by the schedule. *permutes*: that a "
            "device runs in a step; *needed*: the most that a stage has to send. *GFLOP*: of a "
            "device in matrix products, of one micro-batch on a first, a middle and a last virtual "
            "stage together. Times in units of "
            "a stage's forward pass: a tick takes as long as its slowest stage (*lockstep*), or "
            "each operation starts when its inputs are there (*event*)."
        )
        about_runs = (
            "Without flushes: the same devices, 16 updates in a run, recomputation, AdamW. "
            "*temporaries* hold the versions of the parameters. *permutes* and *lockstep time*: of "
            "an update, the latter without the ends of the run, beside 1F1B (aligned) with a flush "
            "after each update."
        )
        parts = table, about_runs, of_runs
        _results.write("pipelines", "Pipelines: memory, messages and time", about, *parts)


if __name__ == "__main__":
    main()
