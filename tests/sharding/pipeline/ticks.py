"""The loops over ticks of a compiled pipeline: what they run and send, and keep between ticks."""

import collections
import re
from typing import NamedTuple

from sharding.pipeline._instructions import instructions
from sharding.plan.audit._hlo import Frame, Instruction, Program, arrays
from sharding.plan.audit._program_collectives import axes_of_groups, collective_op, device_groups
from sharding.plan.cost._wire_and_flops import num_permutes

RENAMES = frozenset(("bitcast", "copy", "opt-barrier"))


class Loop(NamedTuple):
    instr: Instruction
    computation: str  # that runs it
    runs: int  # how often it starts in a step
    trips: int | None  # its iterations; None where that is not constant
    sent: list  # an array for each permute of an iteration


class Slots(NamedTuple):
    """Buffers of one kind that ticks write and read."""

    scheduled: int  # one more than the schedule needs of each: for what nobody expects
    found: int
    nbytes: float


class Ticks(NamedTuple):
    runs: int
    iterations: tuple
    permutes: int  # of a step
    message: float  # bytes of one
    activations: Slots  # and cotangents
    residuals: Slots
    others: float  # bytes that the schedule does not need
    copied: float  # bytes of the slots that a tick copies

    @property
    def kept(self):
        return self.activations.nbytes + self.residuals.nbytes + self.others

    @property
    def excess(self):
        more = max(self.activations.found - self.activations.scheduled, 0)
        return self.others + more * self.message


def scheduled(pipeline):
    """The iterations of the loops, and the permutes of one run."""
    lowered = instructions(pipeline.schedule, pipeline.recompute)
    return tuple(len(part.tables["code"]) for part in lowered.segments), num_permutes(lowered)


def ticks(compiled, pipeline):
    """Reads the loops of a step whose messages have one array; else their shapes are unknown."""
    reader = Reader(Program(compiled), pipeline)
    loops, lowered = reader.loops.values(), instructions(pipeline.schedule, pipeline.recompute)
    (message,) = {array for loop in loops for array in loop.sent}
    layers = max(pipeline.layer_counts)
    depths = [n + 1 for n in (lowered.num_residuals, lowered.num_crossing) if n]
    kept = max(map(reader.kept, loops), key=lambda kept: sum(x.nbytes for x, *_ in kept))
    kinds, copied = collections.defaultdict(list), 0.0
    for array, copies, has_params in kept:
        copied += copies * array.nbytes
        if message.dims in (array.dims, array.dims[1:]):
            kinds["activations"].append(array)
        elif array.dims[:2] in [(n, layers) for n in depths] and not has_params:
            kinds["residuals"].append(array)
        else:
            kinds["others"].append(array)
    nbytes = {kind: sum(x.nbytes for x in found) for kind, found in kinds.items()}
    slots = sum(1 if x.dims == message.dims else x.dims[0] for x in kinds["activations"])
    stored = {x.dims[0] for x in kinds["residuals"]}
    return Ticks(
        max(loop.runs for loop in loops),
        tuple(loop.trips for loop in loops),
        sum(loop.runs * loop.trips * len(loop.sent) for loop in loops),
        message.nbytes,
        Slots(lowered.num_messages + 1, slots, nbytes.get("activations", 0.0)),
        Slots(sum(depths), sum(n for n in depths if n in stored), nbytes.get("residuals", 0.0)),
        nbytes.get("others", 0.0),
        copied,
    )


def behind(instr, table):
    """The instruction that made what others rename."""
    while instr.op in RENAMES and instr.operands[0] in table:
        instr = table[instr.operands[0]]
    return instr


class Reader:
    """What an iteration changes and nothing reads after the last one is kept between ticks.

    What is read afterwards is a result: gradients and sums, but for aux of each micro-batch.
    """

    def __init__(self, program, pipeline):
        self.program, self.pipeline = program, pipeline
        found = self._sending(Frame(program, program.entry), 1)
        self.loops = {loop.instr.name: loop for loop in found}

    def _sending(self, frame, runs):
        """The innermost loops that permute along the pipeline's axis, of a frame, in order."""
        for instr in frame.instructions.values():
            trips = frame.trip_count(instr) if instr.op == "while" else 1
            inner = [y for x in frame.inside(instr) for y in self._sending(x, runs * (trips or 1))]
            yield from inner
            sent = list(self._sent(instr.called[0])) if instr.op == "while" and not inner else []
            if sent:
                yield Loop(instr, frame.computation, runs, trips, sent)

    def _sent(self, computation):
        """The arrays that a computation permutes along the axis, but for loops in it."""
        table, of = self.program.computations[computation], self.pipeline
        for instr in table.values():
            for name in instr.called if instr.op != "while" else ():
                yield from self._sent(name)
            if not instr.called and collective_op(instr) == "collective-permute":
                pairs = device_groups(instr.attributes, self.program.num_devices)
                if axes_of_groups(pairs, of.mesh) == (of.axis,):
                    yield from (array for x in instr.operands for array in arrays(table[x].type))

    def kept(self, loop):
        """Arrays that a loop keeps; whether a tick copies them; whether they have parameters."""
        body = loop.instr.callees("body")[0]
        table, root = self.program.computations[body], self.program.roots[body]
        made = [behind(table[name], table) for name in table[root].operands]
        changed = [
            x.element != i or table[x.operands[0]].op != "parameter" for i, x in enumerate(made)
        ]
        every = list(zip(arrays(loop.instr.type), changed, strict=True))
        microbatches = self.pipeline.schedule.num_microbatches
        rows = self.pipeline.schedule.num_chunks * max(self.pipeline.layer_counts)
        params = {x.dims[1:] for x, changed in every if not changed and x.dims[:1] == (rows,)}
        copies, found = self._copies(body), []
        for i, (array, is_changed) in enumerate(every):
            if not is_changed or not array.dims or not array.elements:
                continue
            of_aux = self.pipeline.has_aux and microbatches == array.dims[0] != rows
            if of_aux or not self._is_read(loop.computation, loop.instr.name, i):
                copied = copies[array.dims] > 0
                copies[array.dims] -= copied
                # Vectors aside: residuals have as many numbers for each layer.
                found.append((array, copied, len(array.dims) > 3 and array.dims[2:] in params))
        return found

    def _is_read(self, computation, name, index):
        """Whether anything reads a value's element but loops over ticks, which may drop it."""
        users = [x for x in self.program.computations[computation].values() if name in x.operands]
        return self.program.roots[computation] == name or any(
            self._reads(computation, user, name, index) for user in users
        )

    def _reads(self, computation, user, name, index):
        if user.op == "get-tuple-element":
            return user.element == index and self._is_read(computation, user.name, None)
        if user.op in RENAMES or user.name in self.loops:
            return self._is_read(computation, user.name, index)
        if user.op != "tuple":
            return True
        places = [i for i, operand in enumerate(user.operands) if operand == name]
        return any(self._is_read(computation, user.name, i) for i in places)

    def _copies(self, body):
        """How many arrays of each shape an iteration copies out of the carry or a branch."""
        most, computations = collections.Counter(), [body]
        for name in computations:
            table, sources = self.program.computations[name], []
            for instr in table.values():
                called = instr.called if instr.op != "while" else []
                computations += [x for x in called if x not in computations]
                if re.match("copy(-start)?$", instr.op):
                    source = table[instr.operands[0]]
                    if source.op in ("get-tuple-element", "parameter"):
                        sources.append(next(arrays(source.type)).dims)
            most |= collections.Counter(sources)
        return most
