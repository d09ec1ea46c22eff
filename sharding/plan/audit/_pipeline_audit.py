"""A compiled pipeline beside its schedule: permutes, iterations, and what is kept between ticks."""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sharding.pipeline._instructions import Instructions
from sharding.pipeline._instructions import instructions as lowered
from sharding.pipeline._pipeline import Pipeline
from sharding.placement._specs import AnyMesh
from sharding.plan._format import Printed, Table, size
from sharding.plan.audit._hlo import (
    ARITHMETIC,
    Array,
    Frame,
    Instruction,
    Program,
    arrays,
    behind,
    bytes_of,
)
from sharding.plan.audit._program_collectives import axes_of_groups, collective_op, device_groups
from sharding.plan.cost._wire_and_flops import num_permutes

_RENAMES = frozenset(("bitcast", "copy", "opt-barrier"))
_COMPUTES = ARITHMETIC | {"convolution", "dot", "gather", "reduce"}
_KERNEL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|conv|triton|tpu_custom_call)')


class KeptArray(NamedTuple):
    """An array that a loop carries from one tick to the next."""

    array: Array  # its type
    scope: str  # the operation that wrote it
    returned: bool  # whether it is read after the last tick
    copied: bool  # whether a tick copies it
    has_params: bool  # whether it has a dim of slots before those of parameters that the loop reads


class TickLoop(NamedTuple):
    instr: Instruction  # the loop
    computation: str  # that runs it
    runs: int  # how often it starts in a step
    trips: int | None  # its iterations; None where that is not constant
    messages: list[list[Array]]  # the arrays that an iteration permutes, by message


def _sending(frame: Frame, runs: int, mesh: AnyMesh, axis: str) -> Iterator[TickLoop]:
    """The innermost loops that permute along an axis, of a frame that runs so often; in order."""
    for instr in frame.instructions.values():
        loops = instr.op == "while"
        trips = frame.trip_count(instr) if loops else 1
        found = (_sending(x, runs * (trips or 1), mesh, axis) for x in frame.inside(instr))
        inner = list(itertools.chain(*found))
        yield from inner
        if loops and not inner:
            messages: _Messages = collections.defaultdict(list)
            _add_messages(messages, frame.program, instr.called[0], mesh, axis)
            if messages:
                yield TickLoop(instr, frame.computation, runs, trips, list(messages.values()))


def _callees(instr: Instruction) -> list[str]:
    """The computations that an instruction runs once."""
    return [] if instr.op == "while" else instr.called


# By senders and receivers, and what made all arrays of a message.
_Messages = dict[tuple[tuple[tuple[int, ...], ...], str], list[Array]]


def _add_messages(
    messages: _Messages, program: Program, computation: str, mesh: AnyMesh, axis: str
) -> None:
    """Adds what a computation permutes along an axis, but for loops in it."""
    table = program.computations[computation]
    for instr in table.values():
        called = _callees(instr)
        for name in called:
            _add_messages(messages, program, name, mesh, axis)
        if not called and collective_op(instr) == "collective-permute":
            pairs = device_groups(instr.attributes, program.num_devices)
            across = instr.op == "send"  # between slices: groups of slices
            if across or axes_of_groups(pairs, mesh) == (axis,):
                for name in instr.operands[:1] if across else instr.operands:
                    key = tuple(pairs), _source(table, instr.operands[0])
                    messages[key] += arrays(table[name].type)


def _source(table: Mapping[str, Instruction], name: str) -> str:
    """The instruction that made a value, perhaps in a tuple, before it was renamed or cast."""
    instr = table[name]
    while len(instr.operands) == 1 and instr.operands[0] in table:
        instr = table[instr.operands[0]]
    return instr.name


@dataclasses.dataclass(eq=False)
class _CarryReader:
    """What loops over ticks keep.

    A compiled loop carries its arrays in a tuple. What an iteration changes and nothing reads after
    the last one is kept from tick to tick: activations, cotangents, residuals. What is read
    afterwards is a result: gradients and sums.
    """

    program: Program
    loops: dict[str, TickLoop]
    microbatches: int  # activations with such a dim 0 are kept, if they are computed before
    rows: int  # the layers of a stage: dim 0 of its stacked parameters

    def kept(self, name: str) -> Iterator[KeptArray]:
        """The arrays that a loop keeps: they change in it, or were made for it before."""
        loop = self.loops[name]
        body = loop.instr.callees("body")[0]
        types = list(arrays(loop.instr.type))
        root = self._root(body)
        if root.op != "tuple" or len(root.operands) != len(types):
            return
        copies = self._copies(body)
        messages = {array.dims for message in loop.messages for array in message}
        changes = [not self._passes(body, x, i) for i, x in enumerate(root.operands)]
        read = [array for array, changed in zip(types, changes, strict=True) if not changed]
        params = {(x.dtype, x.dims[1:]) for x in read if x.dims[:1] == (self.rows,)}
        for i, array in enumerate(types):
            if not array.dims or not array.elements:
                continue
            if changes[i] or self._made_before(loop, i, array, messages):
                returned = changes[i] and self._is_read_after(name, i)
                copied = copies[array.dtype, array.dims] > 0
                copies[array.dtype, array.dims] -= copied
                # Vectors aside: residuals have as many numbers for each layer.
                has_params = len(array.dims) > 3 and (array.dtype, array.dims[2:]) in params
                yield KeptArray(array, self._scope(loop, i), returned, copied, has_params)

    def _root(self, computation: str) -> Instruction:
        return self.program.computations[computation][self.program.roots[computation]]

    def _passes(self, body: str, name: str, index: int) -> bool:
        """Whether an iteration returns an element of the carry as it got it."""
        table = self.program.computations[body]
        instr = behind(table[name], table, _RENAMES)
        return instr.element == index and table[instr.operands[0]].op == "parameter"

    def _scope(self, loop: TickLoop, index: int) -> str:
        """The operation that writes an element; that of the first one, if iterations pass it on."""
        body = loop.instr.callees("body")[0]
        table, name = self.program.computations[body], self._root(body).operands[index]
        if self._passes(body, name, index):
            table = self.program.computations[loop.computation]
            name = table[loop.instr.operands[0]].operands[index]
        return self.program.scope(behind(table[name], table, _RENAMES), table)

    # --- Before the loop --------------------------------------------------------------------------

    def _made_before(
        self, loop: TickLoop, index: int, array: Array, messages: set[tuple[int, ...]]
    ) -> bool:
        """Whether it is of an earlier loop, or has computed activations of every micro-batch."""
        table = self.program.computations[loop.computation]
        init = table[loop.instr.operands[0]]
        if init.op != "tuple":
            return False
        instr = behind(table[init.operands[index]], table, _RENAMES)
        if instr.op == "get-tuple-element" and instr.operands[0] in self.loops:
            earlier = self.loops[instr.operands[0]]
            body, element = earlier.instr.callees("body")[0], instr.element
            assert element is not None
            return not self._passes(body, self._root(body).operands[element], element)
        if array.dims[0] != self.microbatches or array.dims[1:] not in messages:
            return False
        return self._is_computed(table, instr)

    def _is_computed(self, table: Mapping[str, Instruction], instr: Instruction) -> bool:
        """Whether a value is more than an argument that was moved, cast or gathered."""
        for _ in range(len(table)):
            called = [self.program.computations[name] for name in instr.callees("calls")]
            if any(map(_computes, itertools.chain([instr], *(x.values() for x in called)))):
                return True
            operands = [table[name] for name in instr.operands if name in table]
            if not operands:
                return False
            instr = max(operands, key=lambda operand: bytes_of(operand.type))
        return False

    # --- After the loop ---------------------------------------------------------------------------

    @functools.cached_property
    def _users(self) -> dict[tuple[str, str], list[Instruction]]:
        users = collections.defaultdict(list)
        for computation in {loop.computation for loop in self.loops.values()}:
            for instr in self.program.computations[computation].values():
                for operand in dict.fromkeys(instr.operands):
                    users[computation, operand].append(instr)
        return users

    def _is_read_after(self, name: str, index: int) -> bool:
        """Whether anything but loops over ticks reads an element after the last iteration."""
        computation = self.loops[name].computation
        return self.program.roots[computation] == name or any(
            self._is_read(computation, instr.name)
            for instr in self._users[computation, name]
            if instr.element in (index, None)
        )

    def _is_read(self, computation: str, name: str) -> bool:
        def reads(user: Instruction) -> bool:
            if user.op in _RENAMES:
                return self._is_read(computation, user.name)
            if user.op != "tuple":
                return True
            # A tuple, unless it hands the value to loops over ticks that drop it.
            readers = self._users[computation, user.name]
            indices = [i for i, operand in enumerate(user.operands) if operand == name]
            return not readers or any(
                reader.name not in self.loops
                or any(self._is_read_after(reader.name, i) for i in indices)
                for reader in readers
            )

        root = self.program.roots[computation]
        return root == name or any(map(reads, self._users[computation, name]))

    # --- In the loop ------------------------------------------------------------------------------

    def _copies(self, body: str) -> collections.Counter[tuple[str, tuple[int, ...]]]:
        """How many arrays of each type an iteration copies out of the carry or a branch."""
        most: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()
        computations = [body]
        for name in computations:
            table = self.program.computations[name]
            sources = []
            for instr in table.values():
                computations += [callee for callee in _callees(instr) if callee not in computations]
                if instr.op in ("copy", "copy-start"):
                    source = table[instr.operands[0]]
                    if source.op in ("get-tuple-element", "parameter"):
                        sources.append(next(arrays(source.type)))
            most |= collections.Counter((x.dtype, x.dims) for x in sources if not x.space)
        return most


def _computes(instr: Instruction) -> bool:
    """Whether an instruction computes data: no indices, no single number, no copy."""
    if instr.op not in _COMPUTES and not _KERNEL.search(instr.attributes):
        return False
    return any(a.dims and a.floating for a in arrays(instr.type))


_SMALL = 1 << 16  # bytes that need no warning
_ACTIVATIONS, _RESIDUALS, _OTHERS = "activations, cotangents", "residuals", "other arrays"


@dataclasses.dataclass(frozen=True)
class StoredSlots:
    """Buffers of one kind that the ticks of a pipeline write and read."""

    name: str  #: what they hold
    #: the slots that the schedule needs, the most of any stage: for activations and cotangents one
    #: more, for what nobody expects; for residuals with those that cross in a split backward pass
    scheduled: int
    found: int  #: those of the program; of other arrays their number
    nbytes: float  #: of the program's, in all
    excess: float = 0.0  #: of them more than the schedule needs
    example: str = ""  #: the largest array of the excess, and the operation that writes it


@dataclasses.dataclass(frozen=True)
class PipelineAudit(Printed):
    """What the program of a pipeline runs, sends and keeps, beside what its schedule says."""

    schedule: str  #: its name
    stages: int  #: of the mesh axis
    microbatches: int  #: of a step
    ticks: int  #: of the schedule
    live: tuple[int, ...]  #: the most activations that each stage stores, by the schedule
    scheduled_iterations: tuple[int, ...]  #: of the loops over ticks
    iterations: tuple[int | None, ...]  #: of the program's loops; None where that is not constant
    runs: int  #: how often they run in a step
    scheduled_permutes: int  #: of a device in one run, as the ticks need them
    permutes: int  #: those of the program in all runs
    messages: int  #: of them the most that any stage has to send in one run
    message_bytes: float  #: of one of them
    slots: tuple[StoredSlots, ...]  #: what is kept between ticks
    sums: float  #: bytes of accumulated gradients, losses and aux
    copied: float  #: bytes of the slots that a tick copies, so that they are in memory twice
    copied_sums: float  #: bytes of the sums that a tick copies
    warnings: tuple[str, ...] = ()  #: in words

    derived = ("wire_bytes", "kept", "excess")

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device permutes in a step."""
        return self.permutes * self.message_bytes

    @property
    def kept(self) -> float:
        """Bytes that the program keeps between ticks, sums aside."""
        return sum(kind.nbytes for kind in self.slots)

    @property
    def excess(self) -> float:
        """Bytes of them more than the schedule needs."""
        return sum(kind.excess for kind in self.slots)

    def tables(self) -> list[Table]:
        """A column for the schedule, one for the program, and the program's bytes."""
        live = " ".join(map(str, self.live)) if self.stages <= 8 else f"at most {max(self.live)}"
        needed = size(self.messages * self.message_bytes)
        rows = [
            ("iterations", _joined(self.scheduled_iterations), _joined(self.iterations), ""),
            ("permutes", str(self.scheduled_permutes), str(self.permutes), size(self.wire_bytes)),
            ("  of which the busiest stage needs", str(self.messages), "", needed),
            ("live activations, by stage", live, "", ""),
        ]
        rows += [
            (f"slots: {kind.name}", str(kind.scheduled), str(kind.found), size(kind.nbytes))
            for kind in self.slots
            if kind.scheduled or kind.nbytes
        ]
        rows.append(("gradients and sums", "", "", size(self.sums)))
        if self.copied + self.copied_sums:
            rows.append(("copied in a tick", "", "", size(self.copied + self.copied_sums)))
        if not self.iterations:
            rows = [(name, scheduled, "", "") for name, scheduled, *_ in rows if scheduled]
        title = f"{self.schedule}, {self.stages} stages, {self.microbatches} micro-batches"
        title = f"Pipeline: {title}, {self.ticks} ticks"
        return [Table(title, ("", "schedule", "program", "bytes"), rows)]


def audit_pipeline(program: Program, pipeline: Pipeline, mesh: AnyMesh) -> PipelineAudit:
    """Reads the loops over ticks of a compiled step.

    An array belongs to a kind of slots by its shape: activations by what is permuted, residuals by
    their number of slots and of layers.
    """
    schedule = pipeline.schedule
    figures, lowering = schedule.check(), lowered(schedule, pipeline.recompute)
    num_layers = max(pipeline.layer_counts)
    loops = list(_sending(Frame(program, program.entry), 1, mesh, pipeline.axis))
    sizes = schedule.num_microbatches, schedule.num_chunks * num_layers
    reader = _CarryReader(program, {loop.instr.name: loop for loop in loops}, *sizes)
    sent = [message for loop in loops for message in loop.messages]
    message = max(sent, key=lambda arrays: sum(array.nbytes for array in arrays), default=[])
    sums, stored = list[KeptArray](), list[KeptArray]()
    for loop in loops:  # loops run one after the other: those that hold most
        found = list(reader.kept(loop.instr.name))
        results = [x for x in found if x.returned and not _is_aux(x.array, pipeline, message)]
        others = [x for x in found if x not in results]
        sums, stored = max(sums, results, key=_held), max(stored, others, key=_held)
    result = PipelineAudit(
        schedule=schedule.name,
        stages=schedule.num_stages,
        microbatches=schedule.num_microbatches,
        ticks=schedule.num_ticks,
        live=figures.live,
        scheduled_iterations=tuple(len(part.tables["code"]) for part in lowering.segments),
        iterations=tuple(loop.trips for loop in loops),
        runs=max((loop.runs for loop in loops), default=0),
        scheduled_permutes=num_permutes(lowering),
        permutes=sum(loop.runs * (loop.trips or 1) * len(loop.messages) for loop in loops),
        messages=max(figures.messages),
        message_bytes=sum(array.nbytes for array in message),
        slots=tuple(_slots(stored, message, lowering, num_layers)),
        sums=_nbytes_of(sums),
        copied=_nbytes_of(kept for kept in stored if kept.copied),
        copied_sums=_nbytes_of(kept for kept in sums if kept.copied),
    )
    return dataclasses.replace(result, warnings=tuple(_warnings(result)))


# --- What is kept ---------------------------------------------------------------------------------


def _held(kept: Sequence[KeptArray]) -> float:
    """The bytes of arrays, with those of their copies."""
    return sum(x.array.nbytes * (1 + x.copied) for x in kept)


def _is_aux(array: Array, pipeline: Pipeline, message: Sequence[Array]) -> bool:
    """Whether a result is the head's aux of every micro-batch, and no gradient."""
    if not pipeline.has_aux or array.dims[0] != pipeline.schedule.num_microbatches:
        return False
    rows = pipeline.schedule.num_chunks * max(pipeline.layer_counts)
    return array.dims[0] != rows or array.dims[1:] in [sent.dims for sent in message]


def _slots(
    stored: Sequence[KeptArray], message: Sequence[Array], lowering: Instructions, num_layers: int
) -> Iterator[StoredSlots]:
    """What is kept, by kind, and what of it is more than the schedule needs."""
    leaves = collections.Counter(array.dims for array in message)
    depths = [n + 1 for n in (lowering.num_residuals, lowering.num_crossing) if n]
    kinds: dict[str, list[KeptArray]] = {_ACTIVATIONS: [], _RESIDUALS: [], _OTHERS: []}
    for kept in stored:
        if _split_slots(kept.array, leaves)[0]:
            kinds[_ACTIVATIONS].append(kept)
        else:
            stores = kept.array.dims[:2] in [(n, num_layers) for n in depths]
            kinds[_RESIDUALS if stores and not kept.has_params else _OTHERS].append(kept)
    activations, residuals, others = kinds.values()

    # An array of slots for each array of a message.
    slots: collections.Counter[tuple[int, ...]] = collections.Counter()
    scheduled, excess = lowering.num_messages + 1, 0.0
    for kept in activations:
        num_slots, dims = _split_slots(kept.array, leaves)
        free = max(scheduled * leaves[dims] - slots[dims], 0)
        slots[dims] += num_slots
        excess += max(num_slots - free, 0) * kept.array.nbytes / num_slots
    most = max((-(-slots[dims] // count) for dims, count in leaves.items()), default=0)
    example = _largest(activations) if excess else ""
    yield StoredSlots(_ACTIVATIONS, scheduled, most, _nbytes_of(activations), excess, example)

    # Residuals have a dim for the layers after that of the slots.
    lengths = {kept.array.dims[0] for kept in residuals}
    num_slots = sum(n for n in depths if n in lengths)
    yield StoredSlots(_RESIDUALS, sum(depths), num_slots, _nbytes_of(residuals))
    nbytes, example = _nbytes_of(others), _largest(others) if others else ""
    yield StoredSlots(_OTHERS, 0, len(others), nbytes, nbytes, example)


def _split_slots(
    array: Array, leaves: collections.Counter[tuple[int, ...]]
) -> tuple[int, tuple[int, ...]]:
    """How many activations an array has, and their dims; 0 for other arrays."""
    if array.dims[1:] in leaves:
        return array.dims[0], array.dims[1:]
    return int(array.dims in leaves), array.dims


def _nbytes_of(kept: Iterable[KeptArray]) -> float:
    return sum(x.array.nbytes for x in kept)


def _largest(kept: Sequence[KeptArray]) -> str:
    """The largest array, as HLO writes it, and the operation that it is from."""
    array, scope, *_ = max(kept, key=lambda x: x.array.nbytes)
    where = f" of {scope.split('/')[-1]}" if scope else ""
    return f"{array.dtype}[{','.join(map(str, array.dims))}]{where}"


# --- In words -------------------------------------------------------------------------------------


def _joined(counts: Sequence[int | None]) -> str:
    return " + ".join("?" if n is None else str(n) for n in counts)


def _warnings(audited: PipelineAudit) -> Iterator[str]:
    if not audited.iterations:
        if audited.stages > 1:
            yield (
                f"no loop of the program permutes along the axis of the {audited.stages} stages: "
                "it is no step of this pipeline"
            )
        return
    if audited.runs > 1:
        yield (
            f"the pipeline is filled and drained {audited.runs} times in a step: give its schedule "
            f"{audited.runs * audited.microbatches} micro-batches, and the step one"
        )
    if audited.excess > _SMALL:
        worst = max(audited.slots, key=lambda kind: kind.excess)
        yield (
            f"the program keeps {size(audited.kept)} from tick to tick, {size(audited.excess)} "
            f"more than the schedule {audited.schedule} needs; the largest of it is "
            f"{worst.example}. Kept for every micro-batch are an aux of the head, activations "
            "computed before the pipeline, parameters among residuals, and what jax.grad stores of "
            "a loop over ticks"
        )
    if audited.copied > _SMALL:
        yield (
            f"each tick copies {size(audited.copied)} of what the program keeps, which is then in "
            "memory twice, as XLA does on CPUs and GPUs with the results of branches"
        )
