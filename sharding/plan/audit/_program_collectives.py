"""Wire bytes: what the collectives of a compiled program send, read from its text."""

import itertools
import math
import re
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from sharding.placement._specs import AnyMesh
from sharding.plan.audit._hlo import Frame, Instruction, Program, arrays

_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_UNCOUNTED = ("ragged-all-to-all", "collective-broadcast")
# The collectives between TPU slices, as their programs name them.
_MEGASCALE = {kind.upper().replace("-", "_"): kind for kind in _KINDS}
_MEGASCALE["ONE_TO_ONE"] = _MEGASCALE.pop("COLLECTIVE_PERMUTE")


# A mesh by its axes, ['x'=4,'y'=2]; its devices follow where they are not in order.
_MESH = r"@?mesh\[([^\]]*)\]"
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


class Collective(NamedTuple):
    """One collective of a compiled program."""

    op: str  # one of ``_KINDS``
    dtype: str  # the dtype that is sent; of several arrays as ``"bf16+f32"``
    elements: int  # of the full array (before a scatter, after a gather), summed over its operands
    group_size: int  # the number of devices in a group
    runs: int  # how often it runs
    wire_bytes: float  # bytes that one device sends in all runs, in the ring convention
    across_slices: bool  # whether it leaves a TPU slice, over the data-center network
    scope: str  # the operation it was compiled from
    # devices by their position in the mesh; pairs of a permute; slices where it leaves them
    groups: tuple[tuple[int, ...], ...] = ()


def wire_bytes(compiled: Any, *, branches: str = "dearest") -> float:
    """Bytes that one device sends in one run of a compiled program.

    In the ring convention, with ``n`` devices in a group: an all-reduce sends 2(n-1)/n of its
    array, a reduce-scatter, all-gather or all-to-all (n-1)/n of the full array, a permute its
    operand. Collectives in loops are multiplied by the trip count.

    Args:
      compiled: what ``jax.jit(f).lower(...).compile()`` returns, or its text.
      branches: which branch of a conditional counts: the ``"dearest"``, or the ``"cheapest"``, as
        of a sync that sends less where gradients are as sparse as expected.

    Raises:
      ValueError: ``branches`` is neither, a loop with collectives has no constant trip count, or a
        collective has no fixed cost.

    Example:
      >>> import jax, sharding as shd
      >>> shd.wire_bytes(jax.jit(lambda x: x + 1).lower(1.0).compile())
      0.0
    """
    return float(sum(sent.wire_bytes for sent in collectives(compiled, branches)))


def collectives(
    compiled: Any, branches: str = "dearest", *, once: bool = False
) -> list[Collective]:
    """Every collective of a compiled program, or of its text, in program order.

    If ``once``, those in loops of unknown trip count run once; else they raise.
    """
    choices: dict[str, Callable[..., Any]] = {"dearest": max, "cheapest": min}
    if branches not in choices:
        raise ValueError(f"branches must be one of {', '.join(choices)}, got {branches!r}.")
    program = compiled if isinstance(compiled, Program) else Program(compiled)
    return _collectives_of_frame(Frame(program, program.entry), 1, choices[branches], once)


def _collectives_of_frame(
    frame: Frame,
    count: int,
    choose: Callable[..., Any],
    once: bool,
    started: Set[str] = frozenset(),
) -> list[Collective]:
    """The collectives of a computation that runs ``count`` times, and of its callees.

    Chains of ``started`` began in its callers; loops continue them.
    """
    program = frame.program
    counted: list[Collective] = []
    chains = set(started)

    def inside(name: str, count: int, arguments: Sequence[Any] = ()) -> list[Collective]:
        called = Frame(program, name, arguments)
        return _collectives_of_frame(called, count, choose, once, chains)

    for instr in frame.instructions.values():
        if instr.op == "while":
            trips = frame.trip_count(instr)
            carried = [frame.invariants(instr)]
            for key in ("body", "condition"):  # which runs once more
                runs = 1 if trips is None else trips + (key == "condition")
                called = inside(instr.callees(key)[0], count * runs, carried)
                if called and trips is None and not once:
                    raise ValueError(
                        f"wire bytes were requested, but the program does not say how often the "
                        f"loop %{instr.name} runs: give it a constant trip count, as lax.scan does."
                    )
                counted += called if runs else []
        elif instr.op == "conditional":
            branches = [inside(name, count) for name in instr.called]
            counted += choose(branches, key=lambda branch: sum(sent.wire_bytes for sent in branch))
        elif instr.op in ("async-update", "async-done"):
            continue  # counted at its async-start, which calls the same computation
        elif op := collective_op(instr):
            counted.append(_measure(op, instr, frame, count))
        else:
            for name in instr.callees("calls") + instr.callees("to_apply"):
                if _continues(instr, name, program, chains):
                    continue
                arguments = [frame.value(operand) for operand in instr.operands]
                for sent in inside(name, count, arguments):
                    if name.startswith("all-reduce-scatter"):
                        # TPU: one reduce-scatter, printed as an all-reduce and a slice.
                        sent = sent._replace(op="reduce-scatter", wire_bytes=sent.wire_bytes / 2)
                    counted.append(sent)
    return counted


def _continues(instr: Instruction, name: str, program: Program, chains: set[str]) -> bool:
    """Whether a fusion continues a collective that an earlier fusion started.

    TPU programs split an asynchronous collective into fusions that each repeat it: a start, several
    ``async_collective_fusion``, and a done. The ids of ``chains`` were seen before.
    """
    if instr.op != "fusion":
        return False
    ids = {
        match[1]
        for part in program.computations[name].values()
        if collective_op(part) and (match := re.search(r'chain_id="(\d+)"', part.attributes))
    }
    if ids:
        seen = ids <= chains
        chains |= ids
        return seen
    done = instr.name.startswith("async-collective-done")
    return done or name.startswith("async_collective_fusion")


def collective_op(instr: Instruction) -> str | None:
    """Which collective an instruction is, or starts; None for others."""
    op = instr.op.removesuffix("-start")
    if op in _UNCOUNTED:
        what = f"%{instr.name} is a {op}, which has no fixed cost"
        raise ValueError(f"wire bytes were requested, but {what}.")
    if instr.op == "send":
        if match := re.search(r'_xla_megascale_transfer_type="(\w+)"', instr.attributes):
            if kind := _MEGASCALE.get(match[1]):
                return kind
            raise ValueError(f"%{instr.name} is a transfer of unknown type {match[1]}.")
        return None if "is_host_transfer=true" in instr.attributes else "collective-permute"
    return op if op in _KINDS else None


def _measure(op: str, instr: Instruction, frame: Frame, count: int) -> Collective:
    """One collective, with the bytes that one device sends in ``count`` runs."""
    # The devices of a group.
    across = instr.op == "send"
    groups = device_groups(instr.attributes, frame.program.num_devices)
    if instr.op.startswith("collective-permute"):
        size = len({end for pair in groups for end in pair}) or 1
    else:
        size = len(groups[0])
    # The full array. A send has a token and a context beside it, the others have arrays only; an
    # all-gather has a shard.
    names = instr.operands[:1] if across else instr.operands
    sent = [array for name in names for array in arrays(frame.instructions[name].type)]
    shards = size if op == "all-gather" else 1
    payload = shards * sum(array.nbytes for array in sent)
    # The share of it that a device sends: in a ring n - 1 times an n-th, an all-reduce twice.
    if op == "collective-permute":
        share = float(size > 1)
    else:
        share = (2 if op == "all-reduce" else 1) * (size - 1) / size
    return Collective(
        op=op,
        dtype="+".join(sorted({array.dtype for array in sent})),
        elements=shards * sum(array.elements for array in sent),
        group_size=size,
        runs=count,
        wire_bytes=count * (share * payload),
        across_slices=across and "megascale" in instr.attributes,
        scope=instr.scope or _scope_of_operand(op, instr, frame),
        groups=tuple(groups),
    )


def _scope_of_operand(op: str, instr: Instruction, frame: Frame) -> str:
    """The scope of a collective that XLA left without one, such as those between slices."""
    # A sum has that of its operand. A gather has none: the operand's says nothing of its purpose.
    scope = "" if op == "all-gather" else frame.program.scope(instr, frame.instructions)
    return "/".join([*scope.split("/")[:-1], op.replace("-", "_")])


def device_groups(attributes: str, num_devices: int) -> list[tuple[int, ...]]:
    """The groups of a collective, from each notation of HLO; pairs of a permute."""
    # {{0,1},{1,2}}: source and target.
    if match := re.search(r"source_target_pairs=\{(\{.*?\})\}", attributes):
        pairs = re.findall(r"\{(\d+),(\d+)\}", match[1])
        return [(int(source), int(target)) for source, target in pairs if source != target]
    # {{0,1},{2,3}}: lists.
    if match := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes):
        return [_ints(ids) for ids in re.findall(r"\{([\d,]+)\}", match[1])]
    # [2,4]<=[4,2]T(1,0): an iota of shape (4, 2), transposed, as 2 groups of 4.
    if match := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", attributes):
        return _rows(_iota(match[3], match[4]).reshape(int(match[1]), int(match[2])))
    # mesh['x'=4,'y'=2] {'y'}: axes of a mesh.
    ids = r"(?:, device_ids=\((.*?)\)(?= \{))?"
    if match := re.search(rf"replica_groups={_MESH}{ids} \{{([^}}]*)\}}", attributes):
        return _groups_of_mesh(match[1], match[2], match[3])
    # Between slices groups of slices, not of devices: {0,1}x..., or a pair.
    if match := re.search(r'_xla_megascale_target="\{([\d,]+)\}x', attributes):
        return [_ints(match[1])]
    if match := re.search(r"_xla_megascale_target=\{+([\d,]+)(?:->([\d,]+))?", attributes):
        return [(int(match[1]), int(match[2]))] if match[2] else [_ints(match[1])]
    # None: all devices.
    if "replica_groups={}" in attributes or "replica_groups" not in attributes:
        return [tuple(range(num_devices))]
    raise ValueError(f"unknown notation of replica_groups: {attributes[:200]!r}.")


def _groups_of_mesh(mesh: str, ids: str | None, over: str) -> list[tuple[int, ...]]:
    """Groups given as axes of a mesh, ``'x'=4, 'y'=2``, or as parts of axes, ``'x':(2)2``."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over)
    dims: list[int] = []
    chosen: list[int] = []
    for name, size in sizes.items():
        # Split the axis where a chosen part begins or ends, so that each part is a dim.
        spans = [(int(before or 1), int(part or size)) for n, before, part in parts if n == name]
        edges = sorted({1, size, *(e for before, part in spans for e in (before, before * part))})
        for low, high in itertools.pairwise(edges):
            if any(before <= low and high <= before * part for before, part in spans):
                chosen.append(len(dims))
            dims.append(high // low)
    if ids and (match := re.fullmatch(_IOTA, ids)):
        flat = _iota(match[1], match[2])
    else:
        flat = np.array(ids.split(","), int) if ids else np.arange(math.prod(dims))
    # Devices by dims (..., *chosen): a row for each group.
    order = [*(i for i in range(len(dims)) if i not in chosen), *chosen]
    size = math.prod(dims[i] for i in chosen)
    return _rows(flat.reshape(dims).transpose(order).reshape(-1, size))


def _iota(dims: str, order: str | None) -> np.ndarray:
    """0, 1, 2 ... in an array of these dims, transposed to this order."""
    ids = np.arange(math.prod(map(int, dims.split(",")))).reshape(_ints(dims))
    return ids.transpose(_ints(order)) if order else ids


def axes_of_groups(groups: Sequence[tuple[int, ...]], mesh: AnyMesh | None) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ; none where no mesh is known."""
    if mesh is None:
        return ()
    sizes = tuple(mesh.shape.values())
    if max((i for group in groups for i in group), default=0) >= math.prod(sizes):
        return ()
    differ = set()
    for group in groups:
        positions = np.array(np.unravel_index(np.array(group), sizes))  # (axes, devices)
        differ |= set(np.flatnonzero((positions != positions[:, :1]).any(1)).tolist())
    return tuple(name for i, name in enumerate(mesh.axis_names) if i in differ)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _rows(ids: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row) for row in ids.tolist()]
