"""The rule of each primitive, and what equations make of values that all rows share."""

import dataclasses
from typing import Any

from sharding.loss import _row_dims as dims
from sharding.loss import _row_products as products
from sharding.loss import _row_rules as rules
from sharding.loss._row_dims import along
from sharding.loss._row_rules import RowStep
from sharding.loss._row_states import (
    INDEX,
    NUMBER,
    Coupled,
    Rows,
    RowsMeet,
    Shared,
    State,
    Weight,
    meets_shared,
)


def _padded(params: dict[str, Any], _: int) -> list[int]:
    return [d for d, config in enumerate(params["padding_config"]) if tuple(config) != (0, 0, 0)]


def _last(count: int) -> rules.Rule:
    """The rule of what works on the last dims, such as on each matrix."""
    return along(lambda _, n: range(n - count, n), "rows are dims of a matrix, or of a transform")


def _random_by_keys(step: RowStep, ins: list[Any]) -> State:
    """Random numbers by keys that are those of rows."""
    rules.same_rows(ins)
    out = next(v for v in ins if isinstance(v, Rows))
    for v in ins:
        out = meets_shared(out, v) if isinstance(v, Shared) else out
    if out.is_linear or any(v.power for v in ins):
        raise RowsMeet(NUMBER)
    return out


_RANDOM_NAMES = """
random_bits random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
rng_bit_generator rng_uniform threefry2x32
"""
RANDOM = frozenset(_RANDOM_NAMES.split())
_REDUCED = [f"reduce_{kind}" for kind in ("max", "min", "prod", "and", "or", "xor")]
_SCATTERS = ["scatter", *(f"scatter-{kind}" for kind in ("add", "sub", "mul", "min", "max"))]
_WINDOWS = [f"reduce_window{kind}" for kind in ("", "_sum", "_max", "_min")]
_WINDOWS += ["select_and_scatter_add", "select_and_gather_add"]
_LINALG = ["cholesky", "lu", "qr", "svd", "eigh", "eig", "schur", "triangular_solve"]
_LINALG += ["householder_product", "geqrf", "tridiagonal"]
RULES: dict[str, rules.Rule] = {
    "broadcast_in_dim": dims.broadcast,
    "transpose": dims.transpose,
    "squeeze": dims.squeeze,
    "reshape": dims.reshape,
    "slice": dims.slice_,
    "concatenate": dims.concatenate,
    "dynamic_slice": dims.dynamic_slice,
    "dynamic_update_slice": dims.dynamic_update_slice,
    "gather": products.gather_rows,
    "pad": along(_padded, "rows are padded", is_linear=True),
    "rev": along(lambda p, _: p["dimensions"], "rows are reversed", is_linear=True),
    "split": dims.split,
    "stack": dims.stack,
    "unstack": dims.unstack,
    "tile": dims.tile,
    "dot_general": products.dot_general,
    **dict.fromkeys(rules.ELEMENTWISE, rules.elementwise),
    **dict.fromkeys(RANDOM - {"rng_bit_generator", "rng_uniform"}, _random_by_keys),
    "reduce_sum": dims.reduce_sum,
    **dict.fromkeys((*_REDUCED, "argmax", "argmin", "reduce"), dims.reduce_other),
    **dict.fromkeys(_WINDOWS, products.window),
    "conv_general_dilated": products.convolution,
    **dict.fromkeys(_SCATTERS, products.scatter),
    "cumsum": along(lambda p, _: [p["axis"]], "rows are added up one by one", is_linear=True),
    **{
        f"cum{kind}": along(lambda p, _: [p["axis"]], "rows are accumulated one by one")
        for kind in ("max", "min", "prod", "logsumexp")
    },
    "sort": along(lambda p, _: [p["dimension"]], "rows are sorted"),
    "top_k": along(lambda p, _: [p.get("axis", -1)], "rows are compared with each other"),
    "approx_top_k": along(
        lambda p, _: [p["reduction_dimension"]], "rows are compared with each other"
    ),
    "fft": along(lambda p, n: range(n - len(p["fft_lengths"]), n), "rows are transformed"),
    **dict.fromkeys(_LINALG, _last(2)),
    **dict.fromkeys(("lu_pivots_to_permutation", "tridiagonal_solve"), _last(1)),
}


# Of a value that has, along another dim than that of rows, as many entries as there are rows.
_KEEP_ENTRIES = rules.ELEMENTWISE | {"broadcast_in_dim", "transpose", "squeeze", "reshape"}
# Whose parameters are not sizes: they are the same for twice the rows.
_FIXED = frozenset(("pad", "conv_general_dilated", *_WINDOWS))


def states_of(step: RowStep, ins: list[Any]) -> list[State]:
    """The states of the results of an equation without inner functions."""
    coupled = [v for v in ins if isinstance(v, Coupled)]
    if coupled:
        return [coupled[0]] * len(step.results)
    if any(hasattr(aval, "inner_aval") for aval in (*step.types, *step.result_types)):
        raise RowsMeet("what is written to a reference is not followed")
    if step.name in ("optimization_barrier", "device_put"):
        return list(ins)
    if step.name == "select_n" and isinstance(ins[0], Shared) and ins[0].number is not None:
        return [ins[1 + int(ins[0].number)]]
    if all(isinstance(v, Shared) for v in ins):
        return [_shared(step, ins)] * len(step.results)
    if step.name not in RULES:
        raise RowsMeet("what it does with rows is not known")
    rows = [(k, v) for k, v in enumerate(ins) if isinstance(v, Rows)]
    if step.name not in _KEEP_ENTRIES and any(step.grown(k) - set(v.dims) for k, v in rows):
        raise RowsMeet("rows meet along another dim that has their number")
    if step.name in _FIXED and step.twin:
        # But vmap makes groups of features of rows.
        groups = {"feature_group_count": step.params.get("feature_group_count")}
        if step.twin.params | groups != step.params | groups:
            raise RowsMeet(NUMBER)
    if (
        any(v.own is not None for _, v in rows)
        and step.name not in {"gather", "scatter"} | rules.SAME
    ):
        raise RowsMeet(INDEX)
    weights = [v for v in ins if isinstance(v, Weight)]
    if weights and step.name not in rules.ELEMENTWISE:
        if step.name not in ("broadcast_in_dim", "reshape", "squeeze"):
            raise RowsMeet(weights[0].cause.reason)
        return [dims.spread(step, weights[0])]
    out = RULES[step.name](step, ins)
    keeps = step.name == "broadcast_in_dim" or step.name in rules.SAME
    if not keeps and isinstance(out, Rows | Weight) and out.spread:
        out = dataclasses.replace(out, spread=frozenset())
    return [out] * len(step.results)


# --- Values that all rows share -------------------------------------------------------------------


def _shared(step: RowStep, ins: list[Any]) -> Shared:
    every = frozenset(range(len(step.result_shape)))
    known = None not in [v.power for v in ins]
    is_random = any(v.random for v in ins)
    if step.name == "iota":
        dim = step.params["dimension"]
        return Shared(frozenset([dim]), counts=dim)
    if step.name in RANDOM:
        return Shared(every, 0 if known and not any(v.power for v in ins) else None, random=True)
    if step.name in rules.ELEMENTWISE:
        return _shared_elements(step, ins)
    if step.name in ("broadcast_in_dim", "transpose", "squeeze", "reshape", "reduce_sum"):
        return _shared_dims(step, ins[0])
    grown = [step.grown(k) for k in range(len(ins))]
    if any(grown):
        return _of_equal_rows(step, ins, grown)
    # Nothing is known of it but whether it depends on the number of rows.
    sizes = [[t.shape for t in s.result_types] for s in (step, step.twin or step)]
    is_fixed = known and sizes[0] == sizes[1] and not any(v.power for v in ins)
    return Shared(every, 0 if is_fixed else None, is_random)


def _of_equal_rows(step: RowStep, ins: list[Any], grown: list[set[int]]) -> Shared:
    """A value of shared ones that have a dim of as many entries as there are rows, all equal."""
    given, every = list(ins), frozenset(range(len(step.result_shape)))
    for k, of in enumerate(grown):
        if len(of) == 1 and of == step.grown(k, 2) and not of & ins[k].varies:
            (dim,) = of
            given[k] = Rows((dim,), step.shape(k)[dim], power=ins[k].power or 0)
    is_random = any(v.random for v in ins)
    try:
        out = states_of(step, given)[0] if any(isinstance(v, Rows) for v in given) else None
    except RowsMeet:
        return Shared(every, None, is_random)
    if not isinstance(out, Rows) or None in [v.power for v in ins]:
        return Shared(every, None, is_random)
    return Shared(every - set(out.dims), out.power, is_random)


def _shared_elements(step: RowStep, ins: list[Any]) -> Shared:
    if step.name == "lt" and ins[0].counts is not None and ins[1].is_zero:
        return Shared(number=False)
    varies = frozenset[int]()
    for k, v in enumerate(ins):
        sizes = step.shape(k)
        varies |= {d for d in v.varies if d < 0 or (sizes and sizes[d] != 1)}
    is_same = step.name in rules.SAME - {"neg"}
    number, counts = (ins[0].number, ins[0].counts) if is_same else (None, None)
    if counts is not None and step.result_types[0].dtype.name not in ("int32", "int64", "uint32"):
        counts = None  # a narrower type may wrap around
    power = rules.power_of(step, ins)
    return Shared(varies, power, any(v.random for v in ins), number, counts)


def _shared_dims(step: RowStep, given: Shared) -> Shared:
    """A shared value whose dims are moved, merged or summed."""
    p, sizes, power = step.params, step.shape(0), given.power
    loops, counts = frozenset(d for d in given.varies if d < 0), None
    if step.name == "broadcast_in_dim":
        to = {d: p["broadcast_dimensions"][d] for d in given.varies - loops if sizes[d] != 1}
        counts = to.get(given.counts) if given.counts is not None else None
    elif step.name == "transpose":
        to = {d: list(p["permutation"]).index(d) for d in given.varies - loops}
    elif step.name == "reshape":
        varies = dims.merged_dims(sizes, step.result_shape, given.varies - loops)
        return dataclasses.replace(given, varies=varies | loops, counts=None)
    else:
        gone = set(p["axes"]) if step.name == "reduce_sum" else set(p["dimensions"])
        to = {d: d - sum(x < d for x in gone) for d in given.varies - loops if d not in gone}
        if step.name == "reduce_sum" and step.grown(0) & gone:
            many, twice = step.grown(0) & gone, step.grown(0, 2) & gone
            is_uniform = many == twice and not gone & given.varies
            power = power + len(twice) if is_uniform and power is not None else None
    number = given.number if step.name != "reduce_sum" or given.is_zero else None
    return Shared(frozenset(to.values()) | loops, power, given.random, number, counts)
