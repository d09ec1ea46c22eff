"""Bytes of main memory that an update reads and writes, from its jaxpr.

Compilers fuse what is computed element by element with what reads it, up to a sum or maximum over
the array: that must be known in full before its result is used. So an update is a series of passes,
each of which reads again what its values are computed from: the arguments, and what an earlier pass
wrote. GPUs take sums over rows and over columns in passes of their own, TPUs and CPUs in one.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
import optax

from optax_ext.equations import UnknownOperationError, inner_jaxprs
from optax_ext.traced_graph import REDUCTIONS, Equation, Graph
from sharding._types import Tree
from sharding.plan.machine._tiles import num_bytes

# Whose operands and results are in memory, as are those of all that have a jaxpr of their own.
_ALONE = {"dot_general", "sort", "top_k", "cumsum", "gather", "scatter", "scatter-add"}
_LEAST = 8  # elements for each result of a reduction that ends a pass


def update_bytes(tx: optax.GradientTransformation, params: Tree, *, gpu: bool) -> float:
    """Bytes that an update moves for one parameter, the mean of one array of each type.

    ``params`` are abstract; gradients have their dtypes. 0 for an update that needs what only a
    step has, such as the loss.
    """
    seen = set[Any]()

    def first(x: Any) -> Any:
        known = (x.shape, x.dtype) in seen
        seen.add((x.shape, x.dtype))
        return None if known else x

    one_each = jax.tree.map(first, params)
    try:
        moved = _bytes_of(tx, one_each, gpu)
    except UnknownOperationError:
        raise
    except (TypeError, ValueError, AttributeError):
        return 0.0
    size = sum(math.prod(x.shape) for x in jax.tree.leaves(one_each))
    return round(moved / size, 2)  # without keys and counters


def _bytes_of(tx: optax.GradientTransformation, params: Tree, gpu: bool) -> float:
    """The bytes of all of it."""
    state = jax.eval_shape(tx.init, params)
    leaves, tree = jax.tree.flatten((params, state, params))
    update = optax.with_extra_args_support(tx).update

    def step(leaves: list[Any]) -> Tree:
        grads, state, params = jax.tree.unflatten(tree, leaves)
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state

    graph = Graph(step, leaves, [False] * len(leaves), portable=True)
    results = set(graph.outputs) & graph.producer.keys()
    kept: set[int] = set()  # values that nothing is fused with
    number: dict[int, int] = {}  # of the first pass that a value can be used in
    reads: dict[tuple[int, Any], set[int]] = {}  # of each pass; of several with one number, by kind

    def add(key: tuple[int, Any], values: Iterable[int]) -> None:
        """Adds what a pass must read to compute these values."""
        found, pending, seen = reads.setdefault(key, set()), list(values), set[int]()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            was_written = value in results and number[value] < key[0]
            if value in graph.constants:
                continue
            if value not in graph.producer or value in kept or was_written:
                found.add(value)
            elif not _ends_pass(eqn := graph.equations[graph.producer[value]], graph):
                pending += eqn.operands

    for i, eqn in enumerate(graph.equations):
        at = max((number.get(x, 0) for x in eqn.operands), default=0)
        alone = eqn.primitive.name in _ALONE or any(inner_jaxprs(eqn))
        ends = _ends_pass(eqn, graph)
        if alone:
            kept |= set(eqn.results)
            add((at, i), eqn.operands)
        elif ends:
            dims = str(eqn.params["axes"]), graph.shape(eqn.operands[0])
            add((at, dims if gpu else None), eqn.operands)
        number |= dict.fromkeys(eqn.results, at + (alone or ends))
    # A result is written by a pass of its number, if there is one.
    last = {key[0]: key for key in reads}
    for value in results - kept:
        key = last.get(number[value], (number[value], None))
        add(key, graph.equations[graph.producer[value]].operands)
    touched = [*(value for values in reads.values() for value in values), *results | kept]
    return float(num_bytes([graph.types[value] for value in touched]))


def _ends_pass(eqn: Equation, graph: Graph) -> bool:
    """Whether all of an array must be read before the result is used."""
    if eqn.primitive.name not in REDUCTIONS:
        return False
    whole, reduced = (math.prod(graph.shape(x[0])) for x in (eqn.operands, eqn.results))
    return whole >= _LEAST * reduced
