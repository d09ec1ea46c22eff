"""For each primitive: what the dims of its operands are in its result, and what kind it is of.

This is all that most primitives need: what becomes of rows, and of what they share, follows from
it. Rules of the few that need more, as reshapes and indices, are in ``_row_equations``, and those
of calls and loops in ``_row_walk``. A primitive that none of them knows couples the rows it reads.
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from optax_ext import traced_graph
from sharding.loss._row_states import Kind, Places, Value

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RowStep:
    """An equation, beside the same one of a trace with other rows if there is one."""

    name: str
    params: dict[str, Any]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    types: tuple[Any, ...]  # of operands
    result_types: tuple[Any, ...]
    equation: Any
    twin: "RowStep | None" = None
    growth: Fraction | int = 2  # the rows of the twin, in those here

    @property
    def shapes(self) -> list[Shape]:
        return [tuple(getattr(aval, "shape", ())) for aval in self.types]

    def result_shape(self, k: int = 0) -> Shape:
        return tuple(getattr(self.result_types[k], "shape", ()))


@dataclasses.dataclass(frozen=True)
class DimRule:
    """What a primitive does with the entries of its operands."""

    places: Callable[[RowStep], list[Places]]  # of the dims of each operand
    kind: Kind = Kind.OTHER
    chosen_by: range = range(0)  # the operands that are predicates or indices


# --- Dims that stay, meet or go -------------------------------------------------------------------

_TAKEN = "some rows are taken by their index"


def _meet(dims_of: Any, what: str = "", goes: bool = False) -> Callable[[RowStep], list[Places]]:
    """Along some dims entries meet, in the way ``what``, or are summed; these may go.

    The dims are those of a parameter, or what a function says of parameters and a number of dims.
    """

    def places(step: RowStep) -> list[Places]:
        found = []
        for shape in step.shapes:
            ndim = len(shape)
            dims = step.params[dims_of] if isinstance(dims_of, str) else dims_of(step.params, ndim)
            dims = dims if isinstance(dims, tuple | list | range) else [dims]
            chosen = {d % ndim for d in dims} if ndim else set()
            of_operand: Places = [d - goes * sum(x < d for x in chosen) for d in range(ndim)]
            for d in chosen:
                of_operand[d] = what or -1 - d
            found.append(of_operand)
        return found

    return places


def _last(count: int) -> Callable[[Any, int], range]:
    return lambda _, ndim: range(max(ndim - count, 0), ndim)


def _padded(params: dict[str, Any], ndim: int) -> list[int]:
    return [d for d in range(ndim) if tuple(params["padding_config"][d]) != (0, 0, 0)]


def _each(step: RowStep) -> list[Places]:
    """Dims that the result has, too; others are a part of each entry, such as of a key."""
    ndim = len(step.result_shape())
    return [[d if d < ndim else _TAKEN for d in range(len(shape))] for shape in step.shapes]


def _broadcast(step: RowStep) -> list[Places]:
    return [[int(d) for d in step.params["broadcast_dimensions"]]]


def _tiled(step: RowStep) -> list[Places]:
    """A single entry is broadcast, as a token of a class is for each image."""
    sizes = zip(step.shapes[0], (step.twin or step).shapes[0], step.params["reps"], strict=True)
    repeated = [rep != 1 and (size, twice) != (1, 1) for size, twice, rep in sizes]
    return [["rows are repeated" if is_long else d for d, is_long in enumerate(repeated)]]


def _transposed(step: RowStep) -> list[Places]:
    permutation = list(step.params["permutation"])
    return [[permutation.index(d) for d in range(len(permutation))]]


def _beside(step: RowStep) -> list[Places]:
    axis = step.params["axis"]
    return [[d + (d >= axis) for d in range(len(shape))] for shape in step.shapes]


def _slice(step: RowStep) -> list[Places]:
    """Of each dim all entries are taken, or written, or not."""
    is_written = step.name == "dynamic_update_slice"
    sizes = step.shapes[1] if is_written else step.result_shape()
    full = [size == of_slice for size, of_slice in zip(step.shapes[0], sizes, strict=True)]
    places = [d if is_full else _TAKEN for d, is_full in enumerate(full)]
    return [places if shape else [] for shape in step.shapes]  # starts are scalars


# --- Products, windows, lookups -------------------------------------------------------------------


def _product(step: RowStep) -> list[Places]:
    """Batch dims, then those of the first operand alone, then of the second; others are summed."""
    contracted, batch = step.params["dimension_numbers"]
    places: list[Places] = []
    count = len(batch[0])
    for k, shape in enumerate(step.shapes):
        places.append([])
        for d in range(len(shape)):
            if d in batch[k]:
                places[k].append(list(batch[k]).index(d))
            elif d in contracted[k]:
                places[k].append(-1 - list(contracted[k]).index(d))
            else:
                places[k].append(count)
                count += 1
    return places


def _convolved(step: RowStep) -> list[Places]:
    """Rows may be the batch."""
    numbers = step.params["dimension_numbers"]
    places: list[Places] = [["rows meet in a convolution"] * len(shape) for shape in step.shapes]
    if step.params["batch_group_count"] == 1:
        places[0][numbers.lhs_spec[0]] = numbers.out_spec[0]
    return places


def _window(step: RowStep) -> list[Places]:
    p = step.params
    names = ("window_dimensions", "window_strides", "base_dilation")
    sizes = [p.get(name) or [1] * len(step.result_shape()) for name in names]
    places: Places = []
    for d, at in enumerate(zip(*sizes, p["padding"], strict=True)):
        is_single = at[:3] == (1, 1, 1) and tuple(at[3]) == (0, 0)
        places.append(d if is_single else "a window reaches over rows")
    return [places if shape else [] for shape in step.shapes]


def _gather(step: RowStep) -> list[Places]:
    """Dims of the table that are taken in full, or row by row; and those of the index."""
    numbers, sizes = step.params["dimension_numbers"], step.params["slice_sizes"]
    of_index = [d for d in range(len(step.result_shape())) if d not in numbers.offset_dims]
    batched = list(numbers.operand_batching_dims)
    table: Places = ["rows are taken by an index"] * len(sizes)
    kept = [d for d in range(len(sizes)) if d not in (*numbers.collapsed_slice_dims, *batched)]
    for d, place in zip(kept, numbers.offset_dims, strict=True):
        table[d] = place if sizes[d] == step.shapes[0][d] else _TAKEN
    for d, i in zip(batched, numbers.start_indices_batching_dims, strict=True):
        table[d] = of_index[i]
    return [table, [*of_index, _TAKEN]]


def _scatter(step: RowStep) -> list[Places]:
    """Dims that are written in full, or row by row; what is added to the same entries is summed."""
    numbers = step.params["dimension_numbers"]
    operand, index, update = ([_WRITTEN] * len(shape) for shape in step.shapes)
    places: list[Places] = [list(operand), list(index), list(update)]
    of_index = [d for d in range(len(update)) if d not in numbers.update_window_dims]
    for i, u in enumerate(of_index):
        places[1][i] = places[2][u] = -1 - i if step.name in _ADDING else _WRITTEN
    batched = list(numbers.operand_batching_dims)
    for d, i in zip(batched, numbers.scatter_indices_batching_dims, strict=True):
        places[0][d] = places[1][i] = places[2][of_index[i]] = d
    kept = [d for d in range(len(operand)) if d not in (*numbers.inserted_window_dims, *batched)]
    for d, u in zip(kept, numbers.update_window_dims, strict=True):
        if step.shapes[2][u] == step.shapes[0][d]:
            places[0][d] = places[2][u] = d
    return places


_WRITTEN = "rows are written by an index"
_ADDING = ("scatter-add", "scatter-sub")

# --- The table ------------------------------------------------------------------------------------

# What is linear, and keeps each element; what adds elements.
_SAME_NAMES = """
convert_element_type copy copy_p imag name pvary real reduce_precision reshard sharding_constraint
stop_gradient
"""
SAME = frozenset(_SAME_NAMES.split())
ADDED = frozenset(("add", "sub", "add_any"))
_MORE_NAMES = """
bessel_i0e bessel_i1e clz complex conj igamma igamma_grad_a igammac log2 mulhi one_minus_square
polygamma regularized_incomplete_beta zeros_like zeta
"""
ELEMENTWISE = traced_graph.ELEMENTWISE | SAME | ADDED | frozenset(_MORE_NAMES.split())
_KEYED_NAMES = """
random_bits random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
threefry2x32
"""
_KEYED = frozenset(_KEYED_NAMES.split())
RANDOM = _KEYED | {"rng_bit_generator", "rng_uniform"}
_LINALG_NAMES = """
cholesky eig eigh geqrf householder_product lu qr schur svd triangular_solve tridiagonal
"""
_COMPARED = "rows are compared with each other"
_MATRIX = "rows are dims of a matrix, or of a transform"
_REDUCED = "rows are reduced, and not added"
_ACCUMULATED = DimRule(_meet("axis", "rows are accumulated one by one"))

_RULES: dict[str, DimRule] = {
    **dict.fromkeys((*ELEMENTWISE, *_KEYED), DimRule(_each)),
    **dict.fromkeys(SAME, DimRule(_each, Kind.MOVES)),
    **dict.fromkeys((*ADDED, "neg"), DimRule(_each, Kind.LINEAR)),
    **dict.fromkeys(("mul", "div"), DimRule(_each, Kind.PRODUCT)),
    "select_n": DimRule(_each, Kind.LINEAR, chosen_by=range(1)),
    "broadcast_in_dim": DimRule(_broadcast, Kind.MOVES),
    "transpose": DimRule(_transposed, Kind.MOVES),
    "squeeze": DimRule(_meet("dimensions", _TAKEN, goes=True), Kind.MOVES),
    "slice": DimRule(_slice, Kind.LINEAR),
    "split": DimRule(_meet("axis", _TAKEN), Kind.LINEAR),
    "rev": DimRule(_meet("dimensions", "rows are reversed"), Kind.LINEAR),
    "pad": DimRule(_meet(_padded, "rows are padded"), Kind.LINEAR),
    "concatenate": DimRule(_meet("dimension", "rows are one after the other"), Kind.LINEAR),
    "stack": DimRule(_beside, Kind.LINEAR),
    "unstack": DimRule(_meet("axis", _TAKEN, goes=True), Kind.LINEAR),
    "tile": DimRule(_tiled, Kind.LINEAR),
    "dynamic_slice": DimRule(_slice, Kind.LINEAR, chosen_by=range(1, 64)),
    "dynamic_update_slice": DimRule(_slice, Kind.LINEAR, chosen_by=range(2, 64)),
    "gather": DimRule(_gather, Kind.LINEAR, chosen_by=range(1, 2)),
    **dict.fromkeys(("scatter", *_ADDING), DimRule(_scatter, Kind.LINEAR, chosen_by=range(1, 2))),
    **{f"scatter-{x}": DimRule(_scatter) for x in ("mul", "min", "max")},
    "dot_general": DimRule(_product, Kind.PRODUCT),
    "conv_general_dilated": DimRule(_convolved, Kind.PRODUCT),
    "reduce_sum": DimRule(_meet("axes", goes=True), Kind.LINEAR),
    **{
        name: DimRule(_meet("axes", _REDUCED, goes=True))
        for name in (*traced_graph.REDUCTIONS - {"reduce_sum"}, "reduce_xor", "argmax", "argmin")
    },
    "reduce": DimRule(_meet("dimensions", _REDUCED, goes=True)),
    "reduce_window_sum": DimRule(_window, Kind.LINEAR),
    **{f"reduce_window{x}": DimRule(_window) for x in ("", "_max", "_min")},
    **{f"select_and_{x}_add": DimRule(_window) for x in ("scatter", "gather")},
    "cumsum": DimRule(_meet("axis", "rows are added up one by one"), Kind.LINEAR),
    **{f"cum{x}": _ACCUMULATED for x in ("max", "min", "prod", "logsumexp")},
    "sort": DimRule(_meet("dimension", "rows are sorted")),
    "top_k": DimRule(_meet(lambda p, _: p.get("axis", -1), _COMPARED)),
    "approx_top_k": DimRule(_meet("reduction_dimension", _COMPARED)),
    "fft": DimRule(_meet(lambda p, n: range(n - len(p["fft_lengths"]), n), "rows are transformed")),
    **dict.fromkeys(_LINALG_NAMES.split(), DimRule(_meet(_last(2), _MATRIX))),
    "lu_pivots_to_permutation": DimRule(_meet(_last(1), _MATRIX)),
}
_UNKNOWN = DimRule(_meet(_last(64), "what it does with rows is not known"))


def rule_of(step: RowStep) -> DimRule:
    """The rule of an equation; where it is not known, rows may not reach it."""
    return _RULES.get(step.name, _UNKNOWN)
