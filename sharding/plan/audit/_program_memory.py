"""What a compiled program holds: its arguments by part, and its temporaries at their peak."""

import collections
import contextlib
import dataclasses
import functools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from sharding._jaxprs import all_equations
from sharding._types import Batch, Tree
from sharding.plan.audit._hlo import (
    ARITHMETIC,
    Array,
    Instruction,
    Program,
    Table,
    arrays,
    behind,
    changed_in_place,
    main_bytes,
    phase_of,
    shaped_as,
)

# By the name of an argument, such as state.params['w'] or state[1][0].mu['w'].
PARTS = {
    "master weights": r"\bmaster\b",
    "optimizer state": r"opt_?state|optimizer|^state\[1\]",
    "parameters": r"params|^state\[0\]|weights|model",
    "batch and others": r"",
}
STATE = tuple(PARTS)[:-1]
# Floats, and the codes of low-bit state; not counters, keys or tokens.
_STATE_DTYPES = r"b?f\d|[us][48]\b"


class Argument(NamedTuple):
    name: str  # as jax names it, such as ``state.params['w']``
    part: str  # one of ``PARTS``, or of the caller's
    array: Array  # its type on one device
    donated: bool  # whether a result takes over its memory
    returned: bool  # whether a new result has its type; gradients do not count
    replicated: bool  # whether every device has the full array

    @property
    def nbytes(self) -> float:
        return self.array.nbytes if self.array.space == 0 else 0.0

    @property
    def root(self) -> str:
        """The argument of the function that it belongs to, such as ``state``."""
        return re.split(r"\W", self.name)[0]


def arguments_of(
    program: Program, parts: Mapping[str, str], shardings: Sequence[Any] = ()
) -> tuple[list[Argument], list[str]]:
    """The arguments, and a note where their part was not found by name.

    Programs for TPUs do not contain the ``shardings`` of their arguments.
    """
    results = _results(program)
    notes = []
    arguments = []
    unnamed = []
    read = _read_by_loss(program, program.entry) if parts is PARTS else set()
    table = program.computations[program.entry]
    given = [instr for instr in table.values() if instr.op == "parameter"]
    if len(shardings) != len(given):  # some arguments are not used
        shardings = ()
    for instr in given:
        for array in arrays(instr.type):
            part = next((p for p, name in parts.items() if re.search(name, instr.scope)), "")
            donated = int(instr.literal) in program.donated
            key = (array.dtype, array.dims)
            returned = donated or results[key] > 0
            results[key] -= returned and not donated
            replicated = "sharding={replicated}" in instr.attributes
            if shardings:
                replicated = shardings[int(instr.literal)].is_fully_replicated
            arguments.append(Argument(instr.scope, part, array, donated, returned, replicated))
            of_state = array.dims and re.match(_STATE_DTYPES, array.dtype)
            if read and part not in STATE and returned and of_state:
                part = "parameters" if (int(instr.literal), None) in read else "optimizer state"
                arguments[-1] = arguments[-1]._replace(part=part)
                unnamed.append(arguments[-1].root)
    if unnamed:
        notes = [
            "arguments of other names than params and opt_state come back, of "
            f"{', '.join(dict.fromkeys(unnamed))}: those that the loss reads are counted as "
            "parameters, others as optimizer state; name them with parts="
        ]
    elif read and not any(argument.part in STATE for argument in arguments):
        notes = [
            "no argument is named params, and none comes back: all are counted as batch and "
            "others; name parameters with parts="
        ]
    return arguments, notes


def _read_by_loss(program: Program, name: str) -> set[tuple[int, int | None]]:
    """The parameters that the loss and its gradient depend on, with the place in one's tuple."""
    table = program.computations[name]
    read: set[tuple[int, int | None]] = set()
    needed: dict[str, set[int | None]] = {}  # of each instruction, places in its result

    def need(instruction: str, *places: int | None) -> None:
        needed.setdefault(instruction, set()).update(places)

    for instr in reversed(table.values()):
        places = needed.get(instr.name, set())
        called = instr.called or instr.callees("calls")
        chooses = instr.op == "conditional"
        for i, callee in enumerate(called, 1):
            for number, place in _read_by_loss(program, callee):
                need(instr.operands[i if chooses else number], place)
        if instr.op == "parameter":
            read |= {(int(instr.literal), place) for place in places}
        elif instr.op == "get-tuple-element" and places:
            need(instr.operands[0], instr.element)
        elif instr.op == "tuple":
            for i, operand in enumerate(instr.operands):
                need(operand, *({None} if places & {i, None} else ()))
        elif instr.op in ("while", "opt-barrier"):
            need(instr.operands[0], *places)
        elif places or (not called and phase_of(instr.scope) in ("forward", "backward")):
            for operand in instr.operands:
                need(operand, None)
    return read


def _results(program: Program) -> collections.Counter:
    """The types of results that are neither written into an argument nor gradients."""
    table = program.computations[program.entry]
    root = table[program.roots[program.entry]]
    names = root.operands if root.op == "tuple" else [root.name]
    types: collections.Counter = collections.Counter()
    for i, (name, array) in enumerate(zip(names, arrays(root.type), strict=False)):
        phase = phase_of(program.scope(table[name], table))
        if i not in program.aliased and phase not in ("forward", "backward", "gradient sync"):
            types[array.dtype, array.dims] += 1
    return types


_RENAMES = frozenset(("tuple", "get-tuple-element", "bitcast"))
_ALIASES = frozenset(("bitcast", "opt-barrier", "while", "add-dependency"))
_ELEMENTWISE = ARITHMETIC | {"select", "convert", "copy", "negate", "compare", "and", "or", "not"}


@dataclasses.dataclass(eq=False)
class Buffer:
    """Memory that one instruction allocates."""

    name: str  # the instruction
    nbytes: float  # without padding
    scope: str = ""  # the operation it was compiled from
    copy_of: str = ""  # the argument that it is a copy of; empty where it is none
    last: int = 0  # the index of the last instruction that reads it
    readers: set[str] = dataclasses.field(default_factory=set)  # the scopes of all


def at_peak(program: Program) -> list[Buffer]:
    """The temporary buffers that are live when their sum is largest, in the order of the schedule.

    Loops, updates of slices, and elementwise operations on an operand that is not read again are
    taken to be in place. Arguments, results and a TPU's fast memory are not temporary.
    """
    return _peak(program, program.entry)[1]


def by_use(buffers: list[Buffer], limit: float | None) -> dict[str, float]:
    """Bytes of temporaries by the phases that make and read them, in all at most ``limit``."""

    def use(buffer: Buffer) -> str:
        made = phase_of(buffer.scope)
        read = {phase_of(scope) for scope in buffer.readers}
        if buffer.copy_of:
            return "copies of arguments"
        if made in ("gather", "update"):
            return {"gather": "gathered parameters", "update": "the update"}[made]
        if made == "gradient sync" or read & {"gradient sync", "update"}:
            return "gradients"
        if made == "forward" and "backward" in read:
            return "saved activations"
        return {"forward": "forward pass", "backward": "backward pass"}.get(made, "other")

    total: dict[str, float] = collections.defaultdict(float)
    for buffer in buffers:
        total[use(buffer)] += buffer.nbytes
    estimate = sum(total.values())
    # The compiler may write a buffer into the memory of a result, where it is no temporary.
    if limit is not None and estimate > limit:
        return {use: value * limit / estimate for use, value in total.items()}
    return dict(total)


def _peak(program: Program, name: str) -> tuple[float, list[Buffer]]:
    """The bytes of a computation's temporaries at their peak, and the buffers that are live."""
    table = program.computations[name]
    made, values = _lifetimes(program, table)
    results = set(_leaves(values[program.roots[name]]))  # its caller counts them
    freed_after = collections.defaultdict(list)
    for buffer in (buffer for buffers in made for buffer in buffers):
        freed_after[buffer.last].append(buffer)
    live: dict[Buffer, float] = {}
    peak = 0.0
    at_peak = list[Buffer]()
    for i, instr in enumerate(table.values()):
        # Allocate: an in-place instruction takes over an operand of its size that ends here.
        allocated = {buffer: buffer.nbytes for buffer in made[i] if buffer not in results}
        loop = instr.op == "fusion" and "kind=kLoop" in instr.attributes
        if loop or instr.op in _ELEMENTWISE:
            for buffer in freed_after[i]:
                if live.get(buffer) and buffer.nbytes in allocated.values():
                    live.pop(buffer)
                    break
        live |= allocated

        # Measure, with the temporaries of the callee that needs most.
        callees = [_peak(program, callee) for callee in instr.called]
        callee_peak, buffers = max(callees, default=(0.0, []), key=lambda callee: callee[0])
        total = sum(live.values()) + callee_peak
        if total > peak:
            peak = total
            at_peak = [*sorted(live, key=lambda x: x.name), *buffers]

        # Free.
        for buffer in freed_after[i]:
            live.pop(buffer, None)
    return peak, at_peak


def _lifetimes(program: Program, table: Table) -> tuple[list[list[Buffer]], dict[str, Any]]:
    """What each instruction of a computation allocates, and its value as ``_value`` has it."""
    made: list[list[Buffer]] = []
    values: dict[str, Any] = {}
    for i, instr in enumerate(table.values()):
        made.append([])
        values[instr.name] = _value(instr, values, made[-1], table, program)
        scope = program.scope(instr, table)
        copied = copied_argument(instr, table)
        for buffer in made[-1]:
            buffer.scope = scope
            buffer.copy_of = copied
            buffer.last = i
        # An instruction that renames a buffer does not use it, its users do.
        for buffer in (buffer for name in instr.operands for buffer in _leaves(values.get(name))):
            buffer.readers.add(scope)
            buffer.last = buffer.last if instr.op in _RENAMES else i
    return made, values


def _leaves(value: Any) -> Iterator[Buffer]:
    if isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    elif value is not None:
        yield value


def _value(
    instr: Instruction, values: dict[str, Any], made: list[Buffer], table: Table, program: Program
) -> Any:
    """What holds a result, with new ones in ``made``: a buffer or None; of a tuple a list."""
    operands = [values.get(name) for name in instr.operands]

    # Results without memory of their own.
    if instr.op in ("parameter", "constant"):
        return None
    if instr.op == "tuple":
        return operands
    if instr.op == "get-tuple-element":
        index = instr.element or 0
        value = operands[0]
        return value[index] if isinstance(value, list) and index < len(value) else value
    if instr.op in _ALIASES and operands:
        return operands[0]

    # Asynchronous operations: the start allocates, the others pass on.
    if instr.op.endswith(("-done", "-update")):
        return operands[0]
    if instr.op.endswith("-start"):
        # The type lists the operands as well, before or after the results.
        own = main_bytes(instr.type) - sum(main_bytes(table[name].type) for name in instr.operands)
        made.append(Buffer(instr.name, max(own, 0.0)))
        return made[0]

    # All others: a buffer for each array that is not an operand updated in place.
    sizes = [0.0 if a.space else a.nbytes for a in arrays(instr.type)]
    results: list[Any] = []
    for i, size in enumerate(sizes):
        if changed := changed_in_place(instr, i, program):
            results.append(operands[changed[0]])
        else:
            name = instr.name if len(sizes) == 1 else f"{instr.name}/{i}"
            made.append(Buffer(name, size))
            results.append(made[-1])
    return shaped_as(instr.type, iter(results))


def copied_argument(instr: Instruction, table: Table) -> str:
    """The name of the argument that an instruction of the entry copies unchanged."""
    if instr.op not in ("copy", "copy-start"):
        return ""
    source = behind(table[instr.operands[0]], table)
    return source.scope if source.op == "parameter" else ""


def temporaries_of(compiled: Any) -> int:
    """Bytes of device memory that a program needs beside its arguments and results."""
    return int(temporary_bytes(compiled.memory_analysis(), tiled=":T(" in compiled.as_text()))


def temporary_bytes(memory: Any, *, tiled: bool) -> float:
    """Bytes of temporaries by ``compiled.memory_analysis()``; of a TPU's program where it is tiled.

    CPUs and GPUs allocate ``temp_size_in_bytes``. For TPUs that is more than the addresses of the
    program take, by up to a half. Their ``peak_memory_in_bytes`` is what is live at once: arguments
    and results, too, what is on the host, and buffers in the memory of the chip, 16 to 128 MiB. The
    addresses end 0 to 6 % above what it leaves for temporaries.
    """
    allocated = float(memory.temp_size_in_bytes)
    if not tiled or not memory.peak_memory_in_bytes:
        return allocated
    live = memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes
    live -= memory.host_temp_size_in_bytes + memory.argument_size_in_bytes
    live -= memory.output_size_in_bytes - memory.alias_size_in_bytes
    return min(allocated, max(0.0, float(live)))


def step_temporaries(
    fn: Callable[[Any, Any], Any],
    params: Tree,
    batch: Batch,
    device: jax.Device,
    *,
    value: bool = True,
) -> float:
    """Bytes of a compiled program that returns a loss, its other results, and its gradient.

    As ``jax.value_and_grad`` does, or without the ``value`` as ``jax.grad``. Infinite where the
    compiler gives up, as beyond a TPU's memory.
    """

    def step(params: Tree, batch: Batch) -> Any:
        def loss(params: Tree) -> Any:
            first, *others = jax.tree.leaves(fn(params, batch))
            return jnp.asarray(first), others

        # The order of results decides in which order XLA computes them.
        grad = jax.value_and_grad if value else jax.grad
        found = grad(loss, has_aux=True, allow_int=True)(params)
        return (found[0], _floating(found[1])) if value else (_floating(found[0]), found[1])

    args = (params, batch)
    shardings = cast(Any, None)
    if is_sharded(args):
        of_grads = [t.sharding for t in _floating(params)]
        shardings = (None, of_grads) if value else (of_grads, None)
    elif not _on_several(jax.make_jaxpr(step)(*args).jaxpr, device):
        shardings = SingleDeviceSharding(device)
        args = jax.tree.map(lambda t: t.update(sharding=shardings), args)
    try:
        lowered = jax.jit(step, out_shardings=shardings).lower(*args)
        # Programs that are not run: no time is spent on fast instructions, which change no bytes.
        options: dict[str, Any] = {"xla_backend_optimization_level": 0}
        if device.platform != "cpu":
            options = _kernels()[0] if device.platform in ("cuda", "gpu") else {}
        return temporaries_of(lowered.compile(options))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.inf


@functools.cache
def _kernels() -> tuple[dict[str, Any], Any]:
    """Options of XLA for GPUs: programs of a search share their kernels, most of their seconds."""
    folder = tempfile.TemporaryDirectory()  # until this process ends
    file = f"{folder.name}/kernels"
    parallel = "xla_gpu_enable_llvm_module_compilation_parallelism"
    return {"xla_gpu_kernel_cache_file": file, parallel: True}, folder


def _on_several(jaxpr: Any, device: jax.Device) -> bool:
    """Whether a program is one of this device and others, by its meshes or that of the context."""
    values = (x for eqn in all_equations(jaxpr) for x in jax.tree.leaves([*eqn.params.values()]))
    meshes = [getattr(x, "mesh", x) for x in values]
    with contextlib.suppress(ValueError):  # inside jit, where meshes are abstract
        meshes.append(jax.sharding.get_mesh())
    meshes = [mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)]
    return any(mesh.size > 1 and device in mesh.devices.flat for mesh in meshes)


def _floating(tree: Tree) -> list[Any]:
    """The leaves that have gradients; those of integers are of dtype float0."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def is_sharded(tree: Tree) -> bool:
    return any(x.sharding is not None for x in jax.tree.leaves(tree))


def types_of(tree: Tree) -> Any:
    """Shapes, dtypes, and the shardings of arrays on several devices."""

    def type_of(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            sharding = None
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)

    return jax.tree.map(type_of, tree)
