"""The bytes that ZeRO steps send and hold, read from programs for compile-only targets.

A decoder-only transformer (bfloat16 on accelerators, float32 on CPU) at every stage and hybrid,
with AdamW, Adafactor and CAME. TPU targets need libtpu, GPU targets jax's CUDA plugin.

  python benchmarks/zero.py               # prints the tables, writes benchmarks/results/zero.md
  python benchmarks/zero.py --smoke       # 8 virtual CPU devices and one optimizer, prints only
  python benchmarks/zero.py --target cpu:8 --target h200x8
"""

import argparse
import dataclasses
import math
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import optax
from _transformer import Config, apply_block, init, make_loss

import optax_ext
import sharding as shd
from sharding.plan import targets
from sharding.plan.audit._program_collectives import collectives

MIB = 2**20
LENGTH = 128  # tokens of a sequence; a micro-batch of a device is one sequence
# (width, 3, heads, head_dim): three matrices.
ATTENTION = optax_ext.by_path(
    {r"qkv$": optax_ext.Factoring((-4,), (-2, -1))}, default=optax_ext.flax_transformer()
)


def muon() -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, AdamW for all other parameters."""
    matrices = shd.by_owner(optax.contrib.muon(1e-3), factoring=ATTENTION)
    return optax.partition(
        {True: matrices, False: optax.adamw(1e-3)},
        lambda params: optax_ext.hidden_matrices(params, ATTENTION),
    )


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax_ext.adafactor(1e-3, factoring=optax_ext.last_two_dims()),
    "came": lambda: optax_ext.came(1e-3),
    "muon": muon,
}
# Targets and their axes of data parallelism; the first axis of two slices is between them.
MESHES = {
    "cpu:8": ((8,), ("data",)),
    "h200x8": ((8,), ("data",)),
    "v5e:2x4": ((2, 4), ("x", "y")),
    "v5e:4x4": ((4, 4), ("x", "y")),
    "v6e:16x16": ((16, 16), ("x", "y")),
    "v5p:4x4x4": ((4, 4, 4), ("x", "y", "z")),
    "v5e:4x4*2": ((2, 4, 4), ("slice", "x", "y")),
}
MUON_TARGETS = ("cpu:8", "h200x8", "v5e:4x4")


@dataclasses.dataclass(frozen=True)
class Case:
    """One step to compile."""

    target: str
    stage: int
    optimizer: str = "adamw"
    scan: bool = True
    hybrid: bool = False
    everywhere: bool = False  # hybrid: optimizer state sharded over the replicas, too
    microbatches: int = 1
    reshard: bool = True

    @property
    def dtype(self) -> Any:
        """Of the parameters: XLA:CPU widens the sums of bfloat16, so that CPUs have float32."""
        return jnp.float32 if self.target.startswith("cpu") else jnp.bfloat16

    @property
    def config(self) -> Config:
        """The model; a small one for CPUs, where the tests compile it."""
        width = 256 if self.target.startswith("cpu") else 2048
        layers = 16 if self.optimizer == "muon" else 4  # a matrix of each shape for 16 devices
        return Config(layers, width, width // 128, 4 * width, self.scan)

    def zero(self) -> shd.Zero:
        """The stage on its mesh."""
        shape, names = MESHES[self.target]
        if self.hybrid and len(shape) == 1:
            shape, names = (2, shape[0] // 2), ("replica", *names)
        return shd.Zero(
            targets.mesh(self.target, shape, names),
            stage=self.stage,
            axis=names[1:] if self.hybrid else names,
            replica_axis=names[0] if self.hybrid else None,
            shard_state_over_replicas=self.everywhere,
            min_shard_size=1024,
            reshard_after_forward=self.reshard,
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """Figures of a compiled step, in bytes of one device."""

    wire: float
    wire_theory: float
    across_slices: float  # the part of wire that leaves a TPU slice
    update: float  # the part of wire for the optimizer's statistics
    arguments: int
    arguments_theory: float
    aliased: int  # the part of the arguments whose memory the new state takes over
    temporaries: int


def lower(case: Case) -> tuple[shd.Zero, shd.Description, jax.stages.Lowered]:
    """The stage, the placement of the state, and the lowered step."""
    zero, tx = case.zero(), OPTIMIZERS[case.optimizer]()

    def make_state() -> tuple[Any, Any]:
        params = init(case.config, case.dtype)
        return params, tx.init(params)

    state = zero.abstract_state(make_state, tx=tx)
    step = zero.train_step(
        make_loss(zero.gathered(apply_block)), tx=tx, microbatches=case.microbatches
    )
    batch = jax.ShapeDtypeStruct((zero.num_devices * case.microbatches, LENGTH + 1), jnp.int32)
    return zero, zero.describe(state, tx=tx), step.lower(state, batch)


def measure(case: Case) -> Measured:
    """Compiles the step and reads it."""
    zero, layout, lowered = lower(case)
    return read(case, zero, layout, lowered.compile())


def read(case: Case, zero: shd.Zero, layout: shd.Description, compiled: Any) -> Measured:
    """The figures of the program."""
    found = collectives(compiled)
    memory = compiled.memory_analysis()
    return Measured(
        wire=sum(each.wire_bytes for each in found),
        wire_theory=wire_theory(case, zero, layout),
        across_slices=sum(each.wire_bytes for each in found if each.across_slices),
        update=sum(each.wire_bytes for each in found if "/update/" in each.scope),
        arguments=memory.argument_size_in_bytes,
        arguments_theory=arguments_theory(case, zero, layout),
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
    )


def wire_theory(case: Case, zero: shd.Zero, layout: shd.Description) -> float:
    """Wire bytes of a step by the table of ``Zero``, parameter by parameter.

    At stage 3 a layer's parameters are gathered twice, those outside the layers once: the tied
    embedding stays in memory from the lookup to the logits, and to the backward pass.
    """
    n, k = zero.num_shards, case.microbatches
    replicas = zero.num_devices // n
    total = 0.0
    for row in layout.rows:
        if row.part != "params":
            continue
        size = math.prod(row.shape) * jnp.dtype(row.dtype).itemsize
        if case.stage == 0 or math.prod(row.shape) < zero.min_shard_size:
            total += 2 * size * (n * replicas - 1) / (n * replicas)  # all-reduced, once
            continue
        layered = "blocks" in row.path and case.reshard
        passes = {1: 2, 2: k + 1, 3: (3 if layered else 2) * k}[case.stage]
        # The replicas all-reduce the shard; or reduce-scatter it, and gather the new parameter.
        total += passes * size * (n - 1) / n + 2 * size / n * (replicas - 1) / replicas
    return total


def arguments_theory(case: Case, zero: shd.Zero, layout: shd.Description) -> float:
    """Parameters, the optimizer state divided by n, and the batch."""
    sizes = {"params": 0, "grads": 0, "opt_state": 0}
    for row in layout.rows:
        sizes[row.part] += math.prod(row.shape) * jnp.dtype(row.dtype).itemsize
    shards = zero.num_devices if case.everywhere else zero.num_shards
    params = sizes["params"] / (zero.num_shards if case.stage == 3 else 1)
    state = sizes["opt_state"] / (shards if case.stage else 1)
    return params + state + case.microbatches * (LENGTH + 1) * 4


HEADER = """\
| target | stage | optimizer | blocks | k | sent, MiB | / theory | between slices | by the update |\
 arguments, MiB | / theory | temporaries, MiB |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def row(case: Case, found: Measured) -> str:
    """A line of the table."""
    stage = str(case.stage)
    if case.hybrid:
        stage += " hybrid, state over all" if case.everywhere else " hybrid"
    if not case.reshard:
        stage += ", not resharded"
    slices = f"{found.across_slices / MIB:.2f}" if found.across_slices else "-"
    return (
        f"| {case.target} | {stage} | {case.optimizer} | {'scan' if case.scan else 'unrolled'} "
        f"| {case.microbatches} | {found.wire / MIB:.2f} | {found.wire / found.wire_theory:.3f} "
        f"| {slices} | {found.update / MIB:.3f} | {found.arguments / MIB:.2f} "
        f"| {found.arguments / found.arguments_theory:.3f} | {found.temporaries / MIB:.1f} |"
    )


def cases(target: str, smoke: bool) -> list[Case]:
    """The steps to compile for a target."""
    if smoke:
        return [Case(target, stage, "came") for stage in range(4)]
    if target.endswith("*2"):
        return [
            *(Case(target, stage, hybrid=True) for stage in (1, 2, 3)),
            *(Case(target, 3, optimizer, hybrid=True) for optimizer in ("adafactor", "came")),
            Case(target, 3, hybrid=True, everywhere=True),
        ]
    if target in ("v6e:16x16", "v5p:4x4x4"):  # slow to compile for
        return [
            *(Case(target, stage) for stage in range(4)),
            *(
                Case(target, stage, optimizer)
                for optimizer in ("adafactor", "came")
                for stage in (2, 3)
            ),
            Case(target, 3, hybrid=True),
        ]
    return [
        Case(target, 0),
        *(
            Case(target, stage, optimizer)
            for optimizer in ("adamw", "adafactor", "came")
            for stage in (1, 2, 3)
        ),
        *(
            Case(target, stage, "muon", scan)
            for scan in (True, False)
            for stage in (1, 2, 3)
            if target in MUON_TARGETS
        ),
        Case(target, 3, scan=False),
        Case(target, 3, reshard=False),
        *(Case(target, stage, microbatches=4) for stage in (1, 2, 3)),
        *(Case(target, 3, hybrid=True, everywhere=everywhere) for everywhere in (False, True)),
    ]


NOTES = """\
All bytes are those of one device. **Sent**: in one step, in the ring convention (all-reduce
2(n-1)/n of the array, reduce-scatter and all-gather (n-1)/n), loops multiplied by their trip
counts; theory is 2, 2, k+1 and 3k times the parameters for stages 0 to 3 (k micro-batches), times
(n-1)/n, in the dtype that is sent, and the sums over the replicas of a hybrid. Parameters count by
their uses: at stage 3 those of a block are gathered twice, the tied embedding once, since it stays
in memory from lookup to logits. "Not resharded" is `reshard_after_forward=False`. **By the
update**: bytes sent for the optimizer's statistics, which theory does not count. Muon, whose
products need full matrices, sends each to its owner and its update back (`by_owner`); its model has
16 layers, the others 4. **Arguments**: parameters, state and batch; theory divides by n where the
stage shards them. **Temporaries**: the compiler's figure,
gradients and activations included.

The cost of accumulation: with k micro-batches stages 2 and 3 send k times as much as stage 1 for
the gradients, and hold 1/n of them; stage 1 reduces once, and holds all. Compare the rows with k =
4.

Between slices (`*2`, two slices joined by a slow network) only the sums of shards travel; with the
state sharded over all devices, their shards and the new parameters.

TPU meshes have the axes of the torus (see scatter_forms.md); over one flat axis the reduce-scatter
is a ring or an all-to-all of the same bytes. Ratios above 1 there come from sums that the compiler
turns into another form, padding, and small arrays. Nothing was run on accelerators."""


def main() -> None:
    """Prints the table; writes that of all targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps on cpu:8; no file")
    parser.add_argument("--target", action="append", choices=MESHES, help="only these; no file")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    names = ["cpu:8"] if options.smoke else options.target or list(MESHES)
    lines = [HEADER]
    print(HEADER)
    for name in names:
        for case in cases(name, options.smoke):
            lines.append(row(case, measure(case)))
            print(lines[-1], flush=True)
    if names == list(MESHES):
        _results.write("zero", "ZeRO steps: bytes sent and held", "", "\n".join(lines), NOTES)


if __name__ == "__main__":
    main()
