"""Floating-point operations and bytes of a compiled program; loops count by their trips."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sharding.plan.audit._hlo import (
    ARITHMETIC,
    Frame,
    Instruction,
    Program,
    Table,
    arrays,
    behind,
    bytes_of,
    main_bytes,
)

# Operations that compute nothing and move nothing.
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
        *("after-all", "partition-id", "replica-id", "add-dependency", "domain"),
    )
)
_AGAIN = re.compile(r"\.remat\d*(?:\.|$)")  # how the clones of XLA's rematerialization are named
_MATMUL = re.compile(r'custom_call_target="__(?:cublas|onednn)\$[^"]*(?:gemm|matmul)[^"]*"')


class Cost(NamedTuple):
    scope: str  # the operation it was compiled from
    flops: float  # two for each multiply-add of a product, one for an element of other arithmetic
    matmul_flops: float  # the part of ``flops`` in matrix products and convolutions
    nbytes: float  # bytes read from main memory and written to it
    again: bool = False  # whether XLA computes it again by itself, to save memory
    fp8: float = 0.0  # the part of ``matmul_flops`` whose operands are floats of 8 bits
    int8: float = 0.0  # and integers of 8 bits


def costs(program: Program, computation: str = "") -> tuple[list[Cost], list[str]]:
    """The cost of each instruction, and the loops of unknown trip count, which count once.

    A conditional counts as its dearest branch.
    """
    unknown: list[str] = []
    frame = Frame(program, computation or program.entry)
    return list(_costs_of_frame(frame, 1, unknown)), unknown


def _costs_of_frame(frame: Frame, count: int, unknown: list[str]) -> Iterator[Cost]:
    """The costs of a computation that runs ``count`` times, and of its callees."""
    program = frame.program
    table = frame.instructions
    for instr in table.values():
        if instr.called:
            trips = frame.trip_count(instr) if instr.op == "while" else 1
            if trips is None:
                unknown.append(instr.name)
            runs = count * (1 if trips is None else trips)
            inside = [list(_costs_of_frame(inner, runs, unknown)) for inner in frame.inside(instr)]
            if instr.op == "conditional":
                inside = [max(inside, key=lambda b: (sum(c.flops for c in b), len(b)))]
            yield from itertools.chain(*inside)
        elif instr.op not in _FREE and not instr.op.endswith(("-done", "-update")):
            found = _flops(instr, table, program)
            nbytes = _bytes(instr, table, program)
            if found.flops or nbytes:
                flops, matmul, fp8, int8 = (count * x for x in found)
                again = bool(_AGAIN.search(instr.name))
                scope = program.scope(instr, table)
                yield Cost(scope, flops, matmul, count * nbytes, again, fp8, int8)


# --- Operations -----------------------------------------------------------------------------------


class _Operations(NamedTuple):
    flops: float = 0.0  # all of them
    matmul: float = 0.0  # of these, those of matrix products
    fp8: float = 0.0  # of these, those of floats of 8 bits
    int8: float = 0.0  # and of integers of 8 bits


def _of_product(flops: float, instr: Instruction, table: Table) -> _Operations:
    """Operations of a matrix product, by the dtype of its operands."""
    dtypes = [next(arrays(text)).dtype for text in _types(instr, table)[:2]]
    fp8 = all(dtype.startswith("f8") for dtype in dtypes)
    int8 = all(dtype in ("s8", "u8") for dtype in dtypes)
    return _Operations(flops, flops, flops * fp8, flops * int8)


def _flops(instr: Instruction, table: Table, program: Program) -> _Operations:
    """The floating-point operations of one instruction."""
    if instr.op == "fusion":
        inner = program.computations[instr.callees("calls")[0]]
        parts = [_flops(inside, inner, program) for inside in inner.values()]
        return _Operations(*map(sum, zip(*parts, strict=True)))
    if instr.op == "dot" or (instr.op == "custom-call" and _MATMUL.search(instr.attributes)):
        return _of_product(_dot(instr, table), instr, table)
    if instr.op == "convolution":
        return _of_product(_convolution(instr, table), instr, table)
    # One operation per element: of what is reduced, of the updates, of the result.
    if instr.op in ("reduce", "reduce-window"):
        # Operands are the arrays, then as many initial values.
        inputs = instr.operands[: max(1, len(instr.operands) // 2)]
        return _Operations(float(sum(_num_floating(table[name].type) for name in inputs)))
    if instr.op == "scatter":
        return _Operations(float(_num_floating(table[instr.operands[-1]].type)))
    return _Operations(float(_num_floating(instr.type) if instr.op in ARITHMETIC else 0))


def _num_floating(text: str) -> int:
    return sum(a.elements for a in arrays(text) if a.floating)


def _dot(instr: Instruction, table: Table) -> float:
    """Two operations for each element of the result and of the contracted dims."""
    # lhs_contracting_dims={1}, or ["1"] in the configuration of a library call.
    text = instr.attributes.replace(" ", "")
    match = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', text)
    shape = next(arrays(table[instr.operands[0]].type)).dims
    summed = [int(d) for d in re.findall(r"\d+", match[1])] if match else []
    return 2.0 * next(arrays(instr.type)).elements * math.prod(shape[d] for d in summed)


def _convolution(instr: Instruction, table: Table) -> float:
    """Two operations for each product of an input and a weight; padding and holes are free."""
    # dim_labels=b01f_01io->b01f: batch, spatial dims and features of input, kernel and output.
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instr.attributes)
    if not labels:
        return 0.0
    left, right, out = (next(arrays(text)).dims for text in (*_types(instr, table)[:2], instr.type))

    # Pairs of an output position and a tap of the kernel that reads an input, over spatial dims.
    options = re.findall(r"(size|stride|pad|[lr]hs_dilate)=(\S+?)[ }]", instr.attributes)
    window = dict(options)
    pairs = 1
    for i in range(len(window["size"].split("x")) if "size" in window else 0):
        keys = ("stride", "lhs_dilate", "rhs_dilate")
        stride, holes, spread = (int(window[k].split("x")[i]) if k in window else 1 for k in keys)
        low = int(window["pad"].split("x")[i].split("_")[0]) if "pad" in window else 0
        inputs = left[labels[1].index(str(i))]
        taps = right[labels[2].index(str(i))]
        outputs = out[labels[3].index(str(i))]
        read = np.arange(outputs)[:, None] * stride - low + np.arange(taps)[None, :] * spread
        # read: (outputs, taps), positions in the input with its holes.
        pairs *= int(np.sum((read >= 0) & (read % holes == 0) & (read <= (inputs - 1) * holes)))
    channels = right[labels[2].index("i")]
    batch = out[labels[3].index("b")]
    features = out[labels[3].index("f")]
    groups = re.search(r"batch_group_count=(\d+)", instr.attributes)
    return 2.0 * pairs * channels * batch * features / (int(groups[1]) if groups else 1)


# --- Bytes ----------------------------------------------------------------------------------------


def _types(instr: Instruction, table: Table) -> list[str]:
    return [table[name].type for name in instr.operands if name in table]


def _copied(part: str, source: str, target: str) -> float:
    """The bytes of a part that are read from its source and written to its target."""
    return bytes_of(part) * float((main_bytes(source) > 0) + (main_bytes(target) > 0))


def _bytes(instr: Instruction, table: Table, program: Program) -> float:
    types = _types(instr, table)
    if instr.op == "fusion":
        name = instr.callees("calls")[0]
        read = sum(
            min(main_bytes(table[operand].type), read_by_fusion(instr, operand, program))
            for operand in instr.operands
            if main_bytes(table[operand].type)
        )
        return read + _written(instr, program.computations[name], program.roots[name])
    # Copies between memories: only the sides in main memory count.
    if instr.op in ("copy-start", "slice-start", "dynamic-slice-start"):
        parts = list(arrays(instr.type))  # (target, source, ...) or (source, target, ...)
        target = parts[0] if instr.op == "copy-start" else parts[1]
        return target.nbytes * ((main_bytes(types[0]) > 0) + (target.space == 0))
    # Slices: the slice is read and written, not the array; each side counts in main memory alone.
    if instr.op in ("slice", "dynamic-slice"):
        return _copied(instr.type, types[0], instr.type) if types else 0.0
    if instr.op == "gather":
        return 2 * main_bytes(instr.type) + main_bytes(types[1])
    if instr.op == "dynamic-update-slice":
        return _copied(types[1], types[1], instr.type)
    if instr.op == "scatter":
        return 3 * main_bytes(types[-1]) + main_bytes(types[1])
    if instr.op.endswith("-start"):
        return main_bytes(instr.type)  # the type lists operands and results
    if instr.op == "custom-call" and 'custom_call_target="AllocateBuffer"' in instr.attributes:
        return 0.0
    return sum(map(main_bytes, types)) + main_bytes(instr.type)


def read_by_fusion(instr: Instruction, operand: str, program: Program) -> float:
    """The bytes of one operand that a fusion reads: the slices, where it only slices it."""
    inner = program.computations[instr.callees("calls")[0]]
    index = instr.operands.index(operand)
    (name,) = (p.name for p in inner.values() if p.op == "parameter" and int(p.literal) == index)
    return _read(inner, name, program)


def _read(inner: Table, name: str, program: Program) -> float:
    """The bytes that the users of an instruction read of it: all, unless each one slices it."""
    total = 0.0
    for user in inner.values():
        if name not in user.operands:
            continue
        # A fusion whose result aliases its operand gives the array another layout by name alone.
        if user.op == "bitcast" or "output_to_operand_aliasing" in user.attributes:
            total += _read(inner, user.name, program)
        elif user.op in ("slice", "dynamic-slice", "gather") and user.operands[0] == name:
            total += bytes_of(user.type)
        elif user.op == "dynamic-update-slice" and user.operands[0] == name:
            continue  # updated in place
        elif user.op == "fusion":
            total += read_by_fusion(user, name, program)
        else:
            return bytes_of(inner[name].type)
    return total


def _written(instr: Instruction, inner: Table, root: str) -> float:
    """The bytes that a fusion writes: the update, of an array that it updates in place."""
    names = inner[root].operands if inner[root].op == "tuple" else [root]
    total = 0.0
    for name, target in zip(names, arrays(instr.type), strict=False):
        source = behind(inner[name], inner)
        in_place = source.op == "dynamic-update-slice"
        written = bytes_of(inner[source.operands[1]].type) if in_place else target.nbytes
        total += 0.0 if target.space else written
    return total
