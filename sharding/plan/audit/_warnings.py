"""Likely mistakes in a compiled step, in words: what is not donated, is replicated, is gathered."""

import collections
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sharding.plan._format import size
from sharding.plan.audit._hlo import (
    Frame,
    Instruction,
    Program,
    arrays,
    bytes_of,
    changed_in_place,
    phase_of,
)
from sharding.plan.audit._program_collectives import Collective
from sharding.plan.audit._program_costs import Cost, read_by_fusion
from sharding.plan.audit._program_memory import STATE, Argument, Buffer, copied_argument

_SMALL = 1 << 16  # bytes that need no warning
_WIDE = 0.05  # the share of the work of matrix products that needs none


def warnings_of(
    program: Program,
    collectives: Sequence[Collective],
    buffers: Sequence[Buffer],
    arguments: Sequence[Argument],
    source: str = "",
) -> list[str]:
    """A sentence for each part of a step that costs more than it should.

    ``buffers`` are the temporaries at the peak; ``source`` is StableHLO, empty where unknown.
    """
    notes = [*_all_reduced(program, collectives), *_gathered_by_update(collectives)]
    notes += _saved_by_loops(program, sum(buffer.nbytes for buffer in buffers))
    notes += [*_donated_and_copied(program), *_not_donated(arguments)]
    notes += _replicated_state(arguments, program.num_devices)
    # Of several loops with one fault, one sentence.
    return [*dict.fromkeys(notes), *_wide_products(arguments, source)]


def computed_again(costs: Sequence[Cost], held: str) -> Iterator[str]:
    """A sentence on what XLA computes again by itself, in a program that holds so many bytes."""
    again = [cost for cost in costs if cost.again]
    if not again:
        return
    # No memory_fitting_level avoids it: O1 to O3 compute as much again, and with O0 the compiler of
    # TPUs fails where it would have computed again, that of GPUs does it all the same (jax 0.10.2).
    flops, total = (sum(cost.flops for cost in x) for x in (again, costs))
    plural = "s" * (len(again) > 1)
    yield (
        f"XLA computes {len(again)} operation{plural} again by itself, {flops / 1e9:,.1f} GFLOP "
        f"({flops / total if total else 0:.1%} of all), in {held}, since the step would otherwise "
        "be above its limit: a peak below it stops this (more micro-batches, jax.checkpoint, a "
        "higher stage)"
    )


def _not_donated(arguments: Sequence[Argument]) -> Iterator[str]:
    doubled = [a for a in arguments if a.part in STATE and a.returned and not a.donated]
    total = sum(argument.nbytes for argument in doubled)
    if total > _SMALL:
        what = " and ".join(dict.fromkeys(argument.part for argument in doubled))
        yield (
            f"the state is not donated: {size(total)} of {what} come back as new arrays while the "
            "old ones are still in memory; jax.jit(step, donate_argnums=...) lets results take it "
            "over, as the steps of Zero do"
        )


def _replicated_state(arguments: Sequence[Argument], num_devices: int) -> Iterator[str]:
    state = [a for a in arguments if a.part in ("optimizer state", "master weights")]
    total = sum(argument.nbytes for argument in state)
    replicated = sum(argument.nbytes for argument in state if argument.replicated)
    if num_devices > 1 and replicated > max(_SMALL, total / 2):
        yield (
            f"{size(replicated)} of optimizer state are replicated: each of the {num_devices} "
            f"devices holds and updates all of it; Zero(mesh, stage=1) shards it to about "
            f"{size(replicated / num_devices)}"
        )


_PRODUCT = re.compile(
    r"stablehlo\.dot_general .*contracting_dims = \[([\d, ]*)\] x .*"
    r": \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>"
)


def _wide_products(arguments: Sequence[Argument], source: str) -> Iterator[str]:
    params = [param for param in arguments if param.part == "parameters"]
    narrow = sum(param.nbytes for param in params if param.array.dtype in ("bf16", "f16"))
    if not source or narrow <= sum(param.nbytes for param in params) / 2:
        return
    total = 0.0
    wide = 0.0
    largest = (0.0, "")
    for match in _PRODUCT.finditer(source):
        *left, dtype = match[2].split("x")
        summed = math.prod(int(left[int(d)]) for d in match[1].split(",") if d.strip())
        flops = 2.0 * summed * math.prod(map(int, match[4].split("x")[:-1]))
        total += flops
        if "f32" in (dtype, match[3].split("x")[-1]):
            wide += flops
            largest = max(largest, (flops, f"{match[2]} with {match[3]}"))
    if wide > _WIDE * total:
        yield (
            f"{wide / total:.0%} of the work of matrix products (loops counted once) is in "
            f"float32, though most parameters are narrower; the largest multiplies {largest[1]}. "
            "One float32 array (a constant, a mask, an input) promotes all operations on it: cast "
            "it, or set Precision(compute=...)"
        )


def _all_reduced(program: Program, collectives: Sequence[Collective]) -> Iterator[str]:
    sums = [sent for sent in collectives if sent.op == "all-reduce"]
    scopes = ("/reduce_scatter", "/psum_scatter")
    requested = sum(sent.wire_bytes for sent in sums if sent.scope.endswith(scopes))
    if requested > _SMALL:
        yield (
            f"{size(requested)} are sent by all-reduces where the program requests "
            "reduce-scatters: twice the bytes; Zero's own reduce-scatter takes a form that the "
            "compiler does not change"
        )
    # TPU: an all-reduce and a slice in a computation of this name run as one reduce-scatter.
    names = [name for name in program.computations if not name.startswith("all-reduce-scatter")]
    wasted = sum(_sliced_afterwards(name, program) for name in names)
    if wasted > _SMALL and requested <= _SMALL:
        yield (
            f"sums of {size(wasted)} are all-reduced and then sliced: each device uses a shard, "
            "and a reduce-scatter (lax.psum_scatter in a shard_map) would send half"
        )


def _sliced_afterwards(computation: str, program: Program) -> float:
    """Bytes of the all-reduces of one computation of which at most half is read."""
    table = program.computations[computation]
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for instr in table.values():
        for operand in instr.operands:
            users[operand].append(instr)

    def read(name: str, nbytes: float) -> float:
        """The bytes that are read of an array; infinite where no slice limits them."""
        total = math.inf if name == program.roots[computation] else 0.0
        for user in users[name]:
            if user.op in ("bitcast", "get-tuple-element", "all-reduce-done"):
                total += read(user.name, nbytes)
            elif user.op in ("slice", "dynamic-slice"):
                total += bytes_of(user.type)
            elif user.op == "fusion":
                total += read_by_fusion(user, name, program)
            else:
                return math.inf
        return total

    total = 0.0
    for instr in table.values():
        if instr.op.removesuffix("-start") == "all-reduce":
            nbytes = sum(bytes_of(table[name].type) for name in instr.operands)
            if nbytes > _SMALL and read(instr.name, nbytes) <= nbytes / 2:
                total += nbytes
    return total


def _gathered_by_update(collectives: Sequence[Collective]) -> Iterator[str]:
    gathers = [sent for sent in collectives if sent.op in ("all-gather", "all-to-all")]
    by_update = [sent for sent in gathers if phase_of(sent.scope) == "update"]
    moved = [sent for sent in by_update if "/by_owner/" not in sent.scope]  # to their owners
    total = sum(sent.wire_bytes for sent in moved)
    if total > _SMALL:
        dearest = max(moved, key=lambda sent: sent.wire_bytes)
        yield (
            f"the optimizer gathers {size(total)} a step (most of it at {dearest.scope}): it needs "
            "full arrays, as matrix optimizers do (see sharding.by_owner), or its state is sharded "
            "unlike its gradient"
        )


def _saved_by_loops(program: Program, peak: float) -> Iterator[str]:
    loops = [
        (Frame(program, name).trip_count(instr), instr)
        for name, table in program.computations.items()
        for instr in table.values()
        if instr.op == "while" and phase_of(instr.scope + "/") == "forward"
    ]
    for steps, loop in ((steps, loop) for steps, loop in loops if steps and steps > 1):
        # Saved: written into an array with a dim for the layers.
        body = program.computations[loop.callees("body")[0]]
        saved = {"gather": 0.0, "forward": 0.0}
        for instr in body.values():
            for i, array in enumerate(arrays(instr.type) if instr.op != "tuple" else ()):
                update = changed_in_place(instr, i, program)
                if update and array.dims[:1] == (steps,):
                    phase = "gather" if phase_of(update[1].scope) == "gather" else "forward"
                    saved[phase] += array.nbytes
        # The carry from layer to layer has to be saved; jax.checkpoint saves nothing else.
        root = body[program.roots[loop.callees("body")[0]]]
        changed = (body[name] for name in root.operands)
        types = (x.type for x in changed if x.op != "get-tuple-element")
        sizes = (x.nbytes for type in types for x in arrays(type) if x.dims[:1] != (steps,))
        carried = max(sizes, default=0.0)
        for phase, least, what, remedy in (
            ("gather", 0.0, "gathered parameters", "reshard_after_forward=True"),
            ("forward", 1.5 * steps * carried, "activations", "jax.checkpoint around a layer"),
        ):
            if saved[phase] > max(_SMALL, peak / 4, least):
                yield (
                    f"temporaries grow with depth: {size(saved[phase] / steps)} of {what} a layer, "
                    f"{size(saved[phase])} in all, are saved for the backward pass; {remedy} saves "
                    "less"
                )


def _donated_and_copied(program: Program) -> Iterator[str]:
    table = program.computations[program.entry]
    given = [instr for instr in table.values() if instr.op == "parameter"]
    donated = {instr.scope for instr in given if int(instr.literal) in program.donated}
    copied = [(instr, copied_argument(instr, table)) for instr in table.values()]
    sizes = ((max(a.nbytes for a in arrays(instr.type)), name) for instr, name in copied if name)
    copies = [(nbytes, name) for nbytes, name in sizes if name in donated]
    total = sum(nbytes for nbytes, _ in copies)
    if total > _SMALL:
        yield (
            f"{size(total)} of donated arguments are copied ({len(copies)} of them, the largest "
            f"{max(copies)[1]}): results that take over their memory are written before they are "
            "last read"
        )


def widened(arguments: list[Argument], sent: list[Collective], shardings: list[Any]) -> list[str]:
    """A note on the CPU's float32 collectives of bfloat16 arrays."""
    platforms = {device.platform for sharding in shardings for device in sharding.device_set}
    narrow = any(arg.part == "parameters" and arg.array.dtype == "bf16" for arg in arguments)
    if platforms != {"cpu"} or not narrow or not any(x.dtype == "f32" for x in sent):
        return []
    return [
        "collectives of bfloat16 arrays are shown as float32: XLA widens them on CPUs; on a TPU or "
        "a GPU they send half"
    ]
