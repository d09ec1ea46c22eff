"""Wire bytes: what the collectives of a compiled program send, read from its text."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_MAX_TRIPS = 1 << 20
_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_UNCOUNTED = ("ragged-all-to-all", "collective-broadcast")
_MEGASCALE = {  # how a TPU program names what goes from slice to slice
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


# A mesh by its axes, and by its devices where they are not in order.
_MESH = r"@?mesh\[([^\]]*)\](?:, device_ids=\(.*?\))?"


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
      op: ``all-reduce``, ``reduce-scatter``, ``all-gather``, ``all-to-all`` or
        ``collective-permute``.
      dtype: of what is sent; two of them as ``"bf16+f32"``.
      elements: of the full array (not yet scattered, or already gathered), summed over the arrays
        that are sent together.
      group_size: how many devices take part.
      runs: how often it runs.
      wire_bytes: what one device sends in all these runs, in the ring convention.
      across_slices: whether it leaves a TPU slice, over the data-center network.
      scope: the operation it was compiled from.
    """

    op: str
    dtype: str
    elements: int
    group_size: int
    runs: int
    wire_bytes: float
    across_slices: bool
    scope: str


def wire_bytes(compiled: Any) -> float:
    """Bytes that one device sends in one run of a compiled program.

    In the ring convention, with ``n`` devices in a group: an all-reduce sends 2(n-1)/n of its
    array, a reduce-scatter, all-gather or all-to-all (n-1)/n of the full array, a permute what it
    is given. What a loop repeats counts as often; of the branches of a conditional, the dearest.

    Args:
      compiled: what ``jax.jit(f).lower(...).compile()`` returns, or its text.

    Raises:
      ValueError: a loop with collectives has no trip count that can be read, or a collective has
        no agreed cost.

    Example:
      >>> import jax, sharding as shd
      >>> shd.wire_bytes(jax.jit(lambda x: x + 1).lower(1.0).compile())
      0.0
    """
    return float(sum(found.wire_bytes for found in collectives(compiled)))


def collectives(compiled: Any) -> list[Collective]:
    """Every collective of a compiled program, in program order; see ``wire_bytes``."""
    program = _Program(compiled if isinstance(compiled, str) else compiled.as_text())
    return _walk(program, _Frame(program, program.entry, []), 1)


class _Instruction(NamedTuple):
    name: str
    type: str
    op: str
    operands: list[str]
    literal: str  # what stands between the parentheses
    attributes: str

    def callees(self, key: str) -> list[str]:
        """The computations that an attribute such as ``calls`` names."""
        match = re.search(rf"\b{key}=(?:{{([^}}]*)}}|%([\w.\-]+))", self.attributes)
        return re.findall(r"[\w.\-]+", match[1] or match[2]) if match else []


class _Program:
    """The computations of an HLO text."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.entry = ""
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])
        self.num_devices = math.prod(map(int, counts))
        name = ""
        for line in text.splitlines():
            if match := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                name = match[2]
                self.computations[name] = {}
                if match[1]:
                    self.entry = name
            elif match := re.match(r"\s+(ROOT )?%([\w.\-]+) = (.*)", line):
                self.computations[name][match[2]] = _parse(match[2], match[3])
                if match[1]:
                    self.roots[name] = match[2]
        if not self.entry:
            raise ValueError("the text of a compiled program was asked for; it has no ENTRY")


def _parse(name: str, text: str) -> _Instruction:
    split = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opening = text.index("(", split)
    closing = _closing(text, opening)
    inside = text[opening + 1 : closing - 1]
    operands = re.findall(r"%([\w.\-]+)", inside)
    op = text[split:opening].strip()
    return _Instruction(name, text[:split], op, operands, inside, text[closing:])


def _closing(text: str, start: int) -> int:
    """Just behind the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


class _Frame:
    """One computation with what is known of its arguments: the integers that steer its loops.

    A value is an int, a list (a tuple's values), or None where it is not known.
    """

    def __init__(self, program: _Program, computation: str, arguments: list[Any]):
        self.program = program
        self.computation = computation
        self.instructions = program.computations[computation]
        self.arguments = arguments
        self.known: dict[str, Any] = {}

    def result(self) -> Any:
        return self.value(self.program.roots[self.computation])

    def value(self, name: str) -> Any:
        if name not in self.known:
            self.known[name] = self._evaluate(self.instructions[name])
        return self.known[name]

    def _evaluate(self, it: _Instruction) -> Any:
        if it.op == "parameter":
            index = int(it.literal)
            return self.arguments[index] if index < len(self.arguments) else None
        if it.op == "tuple":
            return [self.value(operand) for operand in it.operands]
        if it.op == "get-tuple-element":
            values = self.value(it.operands[0])
            match = re.search(r"index=(\d+)", it.attributes)
            return values[int(match[1])] if isinstance(values, list) and match else None
        if it.op == "while":
            return self.invariants(it)
        if it.op == "opt-barrier":
            return self.value(it.operands[0])
        if not re.match(r"\w+\[\]", it.type):
            return None
        if it.op == "constant":
            return int(it.literal) if re.fullmatch(r"-?\d+", it.literal) else None
        if callees := it.callees("calls") + it.callees("to_apply"):
            arguments = [self.value(operand) for operand in it.operands]
            return _Frame(self.program, callees[0], arguments).result()
        if it.op in ("copy", "bitcast", "convert"):
            return self.value(it.operands[0])
        if it.op in ("add", "subtract", "multiply", "compare"):
            left, right = (self.value(operand) for operand in it.operands)
            if not isinstance(left, int) or not isinstance(right, int):
                return None
            if it.op == "compare":
                match = re.search(r"direction=(\w+)", it.attributes)
                return _compare(left, right, match[1]) if match else None
            return {"add": left + right, "subtract": left - right, "multiply": left * right}[it.op]
        return None

    def invariants(self, loop: _Instruction) -> Any:
        """What a loop carries and does not change."""
        before = self.value(loop.operands[0])
        after = _Frame(self.program, loop.callees("body")[0], [before]).result()
        if not isinstance(before, list) or not isinstance(after, list):
            return None
        return [a if a == b else None for a, b in zip(before, after, strict=True)]

    def trip_count(self, loop: _Instruction) -> int | None:
        """How often a loop runs: as XLA noted it, else by running it on its integers."""
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(match[1])
        state = self.value(loop.operands[0])
        body, condition = loop.callees("body")[0], loop.callees("condition")[0]
        for trips in range(_MAX_TRIPS):
            go_on = _Frame(self.program, condition, [state]).result()
            if go_on is None:
                return None
            if not go_on:
                return trips
            state = _Frame(self.program, body, [state]).result()
        return None


def _compare(left: int, right: int, direction: str) -> bool:
    return {
        "LT": left < right,
        "LE": left <= right,
        "GT": left > right,
        "GE": left >= right,
        "EQ": left == right,
        "NE": left != right,
    }[direction]


def _walk(program: _Program, frame: _Frame, count: int) -> list[Collective]:
    """The collectives of a computation that runs ``count`` times, and of those it calls."""
    found: list[Collective] = []
    chains: set[str] = set()

    def inside(name: str, count: int, arguments: list[Any]) -> list[Collective]:
        return _walk(program, _Frame(program, name, arguments), count)

    for it in frame.instructions.values():
        if it.op == "while":
            carried = [frame.invariants(it)]
            body = inside(it.callees("body")[0], count, carried)
            condition = inside(it.callees("condition")[0], count, carried)
            if body or condition:
                trips = frame.trip_count(it)
                if trips is None:
                    raise ValueError(
                        f"wire bytes asked for, but how often the loop %{it.name} runs cannot be "
                        "read from the program; give it a fixed number of steps, as lax.scan does"
                    )
                found += [_repeat(each, trips) for each in body if trips]
                found += [_repeat(each, trips + 1) for each in condition]
        elif it.op == "conditional":
            names = [
                name
                for key in ("branch_computations", "true_computation", "false_computation")
                for name in it.callees(key)
            ]
            branches = [inside(name, count, []) for name in names]
            found += max(branches, key=lambda branch: sum(each.wire_bytes for each in branch))
        elif it.op in ("async-update", "async-done"):
            continue  # async-start has named the same computation
        elif op := _kind(it):
            found.append(_measure(op, it, frame, count))
        else:
            for name in it.callees("calls") + it.callees("to_apply"):
                if _goes_on(it, name, program, chains):
                    continue
                arguments = [frame.value(operand) for operand in it.operands]
                called = inside(name, count, arguments)
                if name.startswith("all-reduce-scatter"):
                    # TPU: one reduce-scatter, written as an all-reduce and a slice.
                    called = [_halve(each) for each in called]
                found += called
    return found


def _goes_on(it: _Instruction, name: str, program: _Program, chains: set[str]) -> bool:
    """Whether a fusion carries on a collective that an earlier one started.

    TPU programs cut an asynchronous collective into fusions that each repeat it: a start, several
    ``async_collective_fusion`` that compute meanwhile, and a done.
    """
    if it.op != "fusion":
        return False
    ids = {
        match[1]
        for each in program.computations[name].values()
        if _kind(each) and (match := re.search(r'chain_id="(\d+)"', each.attributes))
    }
    if ids:
        seen = ids <= chains
        chains |= ids
        return seen
    return name.startswith("async_collective_fusion") or it.name.startswith("async-collective-done")


def _kind(it: _Instruction) -> str | None:
    """Which collective an instruction is, or starts; None for others."""
    op = it.op.removesuffix("-start")
    if op in _UNCOUNTED:
        raise ValueError(f"wire bytes asked for, but %{it.name} is a {op}, which has no fixed cost")
    if it.op == "send":
        if match := re.search(r'_xla_megascale_transfer_type="(\w+)"', it.attributes):
            if match[1] not in _MEGASCALE:
                raise ValueError(f"%{it.name} is a transfer of unknown type {match[1]}")
            return _MEGASCALE[match[1]]
        return None if "is_host_transfer=true" in it.attributes else "collective-permute"
    return op if op in _KINDS else None


def _measure(op: str, it: _Instruction, frame: _Frame, count: int) -> Collective:
    across = it.op == "send"
    size = _group_size(it.attributes, frame.program.num_devices)
    # A send has tokens and a context beside its array; the collectives have arrays only.
    names = it.operands[:1] if across else it.operands
    arrays = [array for name in names for array in _arrays(frame.instructions[name].type)]
    copies = size if op == "all-gather" else 1
    payload = copies * sum(elements * bits / 8 for _, elements, bits in arrays)
    if op == "collective-permute":
        share = float(size > 1)
    else:
        share = (2 if op == "all-reduce" else 1) * (size - 1) / size
    scope = re.search(r'op_name="([^"]*)"', it.attributes)
    return Collective(
        op=op,
        dtype="+".join(sorted({dtype for dtype, _, _ in arrays})),
        elements=copies * sum(elements for _, elements, _ in arrays),
        group_size=size,
        runs=count,
        wire_bytes=count * share * payload,
        across_slices=across and "megascale" in it.attributes,
        scope=scope[1] if scope else "",
    )


def _arrays(text: str) -> Iterator[tuple[str, int, int]]:
    """Dtype, elements and bits per element of each array in a type."""
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", text):
        width = re.match(r"[a-z]+(\d+)", dtype)
        bits = 8 if dtype == "pred" else int(width[1]) if width else 0
        yield dtype, math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d), bits


def _group_size(attributes: str, num_devices: int) -> int:
    """How many devices take part, from each of the notations for groups."""
    if match := re.search(r"source_target_pairs=\{(\{.*?\})\}", attributes):
        pairs = re.findall(r"\{(\d+),(\d+)\}", match[1])
        return len({end for pair in pairs if pair[0] != pair[1] for end in pair}) or 1
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(match[1])
    if match := re.search(rf"replica_groups={_MESH} \{{([^}}]*)\}}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    if match := re.search(r'_xla_megascale_target="\{([\d,]+)\}x', attributes):
        return len(match[1].split(","))
    if match := re.search(r"_xla_megascale_target=\{+([\d,]+)(->)?", attributes):
        return 2 if match[2] else len(match[1].split(","))
    if "replica_groups={}" in attributes or "replica_groups" not in attributes:
        return num_devices
    raise ValueError(f"unknown notation of replica_groups: {attributes[:200]!r}")


def _repeat(found: Collective, times: int) -> Collective:
    return found._replace(runs=found.runs * times, wire_bytes=found.wire_bytes * times)


def _halve(found: Collective) -> Collective:
    return found._replace(op="reduce-scatter", wire_bytes=found.wire_bytes / 2)
