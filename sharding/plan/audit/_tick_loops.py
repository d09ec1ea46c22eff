"""The loops of a compiled pipeline over its ticks: what they send, and what they keep between them.

A compiled loop carries its arrays in a tuple. What an iteration changes and nothing reads after the
last one is kept from tick to tick: activations, cotangents, residuals. What is read afterwards is a
result: gradients and sums.
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from sharding.placement._specs import AnyMesh
from sharding.plan.audit._hlo import (
    ARITHMETIC,
    Array,
    Frame,
    Instruction,
    Program,
    Table,
    arrays,
    behind,
    bytes_of,
)
from sharding.plan.audit._program_collectives import axes_of_groups, collective_op, device_groups

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
    kept: tuple[KeptArray, ...] = ()  # the arrays that it keeps


def tick_loops(
    program: Program, mesh: AnyMesh, axis: str, microbatches: int, rows: int
) -> list[TickLoop]:
    """The innermost loops that permute along the mesh axis of the stages, in program order.

    Activations with a dim 0 of ``microbatches`` that are computed before the loop count as kept;
    ``rows`` are the layers of a stage: dim 0 of its stacked parameters.
    """
    loops = list(_sending(Frame(program, program.entry), 1, mesh, axis))
    reader = _CarryReader(program, {loop.instr.name: loop for loop in loops}, microbatches, rows)
    return [loop._replace(kept=tuple(reader.kept(loop.instr.name))) for loop in loops]


def _sending(frame: Frame, runs: int, mesh: AnyMesh, axis: str) -> Iterator[TickLoop]:
    """The loops that permute, of a computation that runs so often, and of its callees."""
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


def _source(table: Table, name: str) -> str:
    """The instruction that made a value, perhaps in a tuple, before it was renamed or cast."""
    instr = table[name]
    while len(instr.operands) == 1 and instr.operands[0] in table:
        instr = table[instr.operands[0]]
    return instr.name


@dataclasses.dataclass(eq=False)
class _CarryReader:
    program: Program
    loops: dict[str, TickLoop]
    microbatches: int
    rows: int

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

    def _is_computed(self, table: Table, instr: Instruction) -> bool:
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
