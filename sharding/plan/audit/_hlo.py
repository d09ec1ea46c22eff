"""The text of a compiled program, parsed: computations, trip counts, phases by jax's scopes."""

import math
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_MAX_TRIPS = 1 << 20
# Attributes that name the computations of an operation.
_CALLS = {
    "while": ("body",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply",),
    "async-start": ("calls",),
}
ARITHMETIC = frozenset(
    (
        *("add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "remainder"),
        *("exponential", "exponential-minus-one", "log", "log-plus-one", "sqrt", "rsqrt", "cbrt"),
        *("tanh", "logistic", "sine", "cosine", "tan", "atan2", "erf"),
    )
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    type: str
    op: str
    operands: list[str]
    literal: str  # the text between the parentheses
    attributes: str

    @property
    def scope(self) -> str:
        """The operation it was compiled from."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def called(self) -> list[str]:
        """The computations that it runs: the body of a loop, branches to choose from, a call's."""
        return [name for key in _CALLS.get(self.op, ()) for name in self.callees(key)]

    @property
    def element(self) -> int | None:
        """The place of what it takes of a tuple; None for other operations."""
        if self.op != "get-tuple-element":
            return None
        return int(self.attributes.split("index=")[1].split(",")[0])

    def callees(self, key: str) -> list[str]:
        """The computations that an attribute such as ``calls`` names."""
        match = re.search(rf"\b{key}=(?:{{([^}}]*)}}|%([\w.\-]+))", self.attributes)
        return re.findall(r"[\w.\-]+", match[1] or match[2]) if match else []


Table = dict[str, Instruction]  # of one computation, by name, in the order of its schedule


class Program:
    """The computations of a compiled program, or of its text."""

    def __init__(self, compiled: Any):
        text = compiled if isinstance(compiled, str) else compiled.as_text()
        self.computations: dict[str, Table] = {}
        self.roots: dict[str, str] = {}
        self.entry = ""
        self.tiled = ":T(" in text  # the layouts of TPUs, whose memory consists of tiles
        header = text.split("\n", 1)[0]
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.num_devices = math.prod(map(int, counts))
        # input_output_alias={ {result}: (argument, {}, may-alias) }: by their numbers, the donated
        # arguments, and the results that take over their memory.
        aliases = re.findall(r"\{([\d,]*)\}: \((\d+), \{[\d,]*\}, m", header)
        self.donated = {int(argument) for _, argument in aliases}
        self.aliased = {int(result or 0) for result, _ in aliases}
        name = ""
        for line in text.splitlines():
            if match := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                name = match[2]
                self.computations[name] = {}
                if match[1]:
                    self.entry = name
            elif name and (match := re.match(r"\s+(ROOT )?%([\w.\-]+) = (.*)", line)):
                self.computations[name][match[2]] = _parse(match[2], match[3])
                if match[1]:
                    self.roots[name] = match[2]
        if not self.entry:
            raise ValueError("expected the text of a compiled program, got one without ENTRY.")

    def scope(self, instr: Instruction, table: Table) -> str:
        """The operation it was compiled from: its own scope, a callee's, or that of its operand."""
        for _ in range(8):  # operands of operands
            called = instr.callees("calls") + instr.called * (instr.op == "call")
            inside = [x for name in called for x in self.computations[name].values()]
            for made in (instr, *reversed(inside)):
                if made.scope and made.op != "parameter":
                    return made.scope
            if not instr.operands or instr.operands[0] not in table:
                break
            instr = table[instr.operands[0]]
        return ""


def _parse(name: str, text: str) -> Instruction:
    # TYPE OP(OPERANDS), ATTRIBUTES; the type of a tuple is in parentheses and has spaces.
    split = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opening = text.index("(", split)
    closing = _closing(text, opening)
    inside = text[opening + 1 : closing - 1]
    operands = re.findall(r"%([\w.\-]+)", inside)
    op = text[split:opening].strip()
    return Instruction(name, text[:split], op, operands, inside, text[closing:])


def behind(instr: Instruction, table: Table) -> Instruction:
    """The instruction that made what bitcasts rename."""
    while instr.op == "bitcast" and instr.operands and instr.operands[0] in table:
        instr = table[instr.operands[0]]
    return instr


def changed_in_place(
    instr: Instruction, index: int, program: Program
) -> tuple[int, Instruction] | None:
    """The operand that one result updates in place, by its index, and the slice that is written.

    None where the result is an array of its own.
    """
    # The instruction that makes the result: the root of a fusion, or one operand of its tuple.
    table = None
    made = instr
    if instr.op == "fusion":
        name = instr.callees("calls")[0]
        table = program.computations[name]
        made = table[program.roots[name]]
        if made.op == "tuple":  # a reduction of several operands in it has several results
            made = [table[x] for x in made.operands for _ in arrays(table[x].type)][index]
        made = behind(made, table)
    if made.op not in ("dynamic-update-slice", "scatter"):
        return None
    # The array that it updates is its first operand; in a fusion, that has to be a parameter.
    if table is None:
        return 0, made
    target = behind(table[made.operands[0]], table)
    if target.op != "parameter":
        return None
    written = table.get(made.operands[1 if made.op == "dynamic-update-slice" else -1], made)
    return int(target.literal), written


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}.")


class Frame:
    """One computation, evaluated as far as integers are known: for the trip counts of its loops.

    A value is an int or bool, a list (the values of a tuple), or None where it is unknown. Values
    are evaluated on demand and remembered, so that a frame is for one set of arguments.
    """

    def __init__(self, program: Program, computation: str, arguments: Sequence[Any] = ()):
        self.program = program
        self.computation = computation
        self.arguments = arguments
        self.instructions = program.computations[computation]
        self.known: dict[str, Any] = {}

    def inside(self, instr: Instruction) -> list["Frame"]:
        """The computations that an instruction runs; branches with unknown arguments."""
        arguments = [self.invariants(instr)] if instr.op == "while" else []
        if instr.op in ("call", "async-start"):
            arguments = [self.value(operand) for operand in instr.operands]
        return [Frame(self.program, name, arguments) for name in instr.called]

    def result(self) -> Any:
        return self.value(self.program.roots[self.computation])

    def value(self, name: str) -> Any:
        if name not in self.known:
            self.known[name] = self._evaluate(self.instructions[name])
        return self.known[name]

    def _evaluate(self, instr: Instruction) -> Any:
        # Values pass through these, of whatever type.
        if instr.op == "parameter":
            index = int(instr.literal)
            return self.arguments[index] if index < len(self.arguments) else None
        if instr.op == "tuple":
            return [self.value(operand) for operand in instr.operands]
        if instr.op == "get-tuple-element":
            values = self.value(instr.operands[0])
            return values[instr.element or 0] if isinstance(values, list) else None
        if instr.op == "while":
            return self.invariants(instr)
        if instr.op == "opt-barrier":
            return self.value(instr.operands[0])

        # Arithmetic on integer scalars.
        if not re.match(r"\w+\[\]", instr.type):
            return None
        if instr.op == "constant":
            return int(instr.literal) if re.fullmatch(r"-?\d+", instr.literal) else None
        if callees := instr.callees("calls") + instr.callees("to_apply"):
            arguments = [self.value(operand) for operand in instr.operands]
            return Frame(self.program, callees[0], arguments).result()
        if instr.op in ("copy", "bitcast", "convert"):
            return self.value(instr.operands[0])
        if instr.op in ("add", "subtract", "multiply", "compare"):
            left, right = (self.value(operand) for operand in instr.operands)
            if isinstance(left, int) and isinstance(right, int):
                name = instr.op[:3]  # as Python's operator has it: add, sub, mul
                if match := re.search(r"direction=(\w+)", instr.attributes):
                    name = match[1].lower()
                return getattr(operator, name)(left, right)
        return None

    def invariants(self, loop: Instruction) -> Any:
        """The loop's carry, with None for what an iteration changes."""
        before = self.value(loop.operands[0])
        after = Frame(self.program, loop.callees("body")[0], [before]).result()
        if not isinstance(before, list) or not isinstance(after, list):
            return None
        return [a if a == b else None for a, b in zip(before, after, strict=True)]

    def trip_count(self, loop: Instruction) -> int | None:
        """How often a loop runs; None where that is not constant."""
        # XLA's own annotation; else iteration by iteration, until the condition is false.
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(match[1])
        state = self.value(loop.operands[0])
        body = loop.callees("body")[0]
        condition = loop.callees("condition")[0]
        for trips in range(_MAX_TRIPS):
            enters = Frame(self.program, condition, [state]).result()
            if enters is None:
                return None
            if not enters:
                return trips
            state = Frame(self.program, body, [state]).result()
        return None


class Array(NamedTuple):
    dtype: str  # as HLO names it
    dims: tuple[int, ...]  # its shape
    elements: int  # their number
    nbytes: float  # without padding
    space: int  # the memory space: 0 the device's main memory, 5 host memory, 1 a TPU's fast memory

    @property
    def floating(self) -> bool:
        return re.match(r"b?f\d", self.dtype) is not None


def arrays(text: str) -> Iterator[Array]:
    """The arrays of a type such as ``(f32[8,4]{1,0}, s32[])``, one by one."""
    for dtype, shape, layout in _ARRAY.findall(text):
        width = re.match(r"[a-z]+(\d+)", dtype)
        bits = 8 if dtype == "pred" else int(width[1]) if width else 0
        dims = tuple(int(d.lstrip("<=")) for d in shape.split(",") if d)
        elements = math.prod(dims)
        space = re.search(r"S\((\d+)\)", layout)
        yield Array(dtype, dims, elements, elements * bits / 8, int(space[1]) if space else 0)


def shaped_as(text: str, values: Iterator[Any]) -> Any:
    """Values for the arrays of a type; of a tuple a list, in which tuples are lists."""
    open_tuples: list[list[Any]] = [[]]
    for token in re.finditer(rf"[()]|{_ARRAY.pattern}", text):
        if token[0] == "(":
            open_tuples.append([])
        elif token[0] == ")":
            values_of_tuple = open_tuples.pop()
            open_tuples[-1].append(values_of_tuple)
        else:
            open_tuples[-1].append(next(values))
    return next(iter(open_tuples[0]), None)


def bytes_of(text: str) -> float:
    """Bytes of a type, in whatever memory."""
    return sum(array.nbytes for array in arrays(text))


def main_bytes(text: str) -> float:
    """Bytes of a type that are in the main memory of the device."""
    return sum(array.nbytes for array in arrays(text) if not array.space)


_OF_JAX = re.compile(
    r"jit\(.*\)|shard_map|while|body|cond|closed_call|checkpoint|rematted_computation|jvp\(\)"
    r"|transpose\(jvp\(\)\)|branch_\d+_fun"
)
_OF_AUTODIFF = re.compile(r"\b(?:transpose|jvp|vmap)\(((?:[^()]|\([^()]*\))*)\)")
PHASES = ("gather", "forward", "backward", "gradient sync", "update", "other")


def phase_of(scope: str) -> str:
    """The phase of an operation, by the names of its scopes."""
    *names, operation = first_of(scope).split("/")
    inside = {part for name in names for part in re.findall(r"\w+", name)}
    if "update" in inside:
        return "update"
    # By the scopes of a step, or by the operation: autodiff turns a gather into a reduce-scatter.
    if inside & {"reduce_gradients", "reduce_scatter"} or operation == "reduce_scatter":
        return "gradient sync"
    if inside & {"gather", "gather_params"} or operation == "all_gather":
        return "gather"
    if inside & {"transpose", "rematted_computation"}:
        return "backward"
    return "forward" if "jvp" in inside else "other"


def shortened(scope: str) -> str:
    """The end of a scope, without the parts that jax adds to every loop and function."""
    text = first_of(scope)
    before = ""
    while text != before:  # a scope with a slash is inside, as in transpose(jvp(a/b))
        text, before = _OF_AUTODIFF.sub(r"\1", text), text
    own = [part for part in text.split("/") if part and not _OF_JAX.fullmatch(part)]
    two = "/".join(own[-2:])
    return two if len(two) <= 18 else own[-1][-18:]


def first_of(scope: str) -> str:
    """The first scope of an operation that XLA merged from several: ``a/(b/x:c/y)``."""
    match = re.fullmatch(r"(.*?/|)\((.*)\)", scope)
    if not match:
        return scope
    depth = 0
    for i, letter in enumerate(match[2]):
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0:
            return match[1] + match[2][:i]
    return match[1] + match[2]
