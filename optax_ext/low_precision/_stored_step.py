"""One step with stored state, leaf by leaf: dequantize, update, quantize; in one pass on TPUs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxpr_as_fun

from optax_ext import _matrix_passes, kernels
from optax_ext._types import Array, Tree
from optax_ext.leaf_by_leaf import ScheduledRun, run_by_leaf
from optax_ext.low_precision._formats import BFloat16, Quantized
from optax_ext.low_precision._one_pass import (
    OnePassUpdates,
    blocks_of,
    dequantized_type,
    has_blocks,
)
from optax_ext.low_precision._rounding import next_key
from optax_ext.low_precision._stored_state import (
    SHARED_TRACES,
    LowPrecisionState,
    dequantized,
    flatten,
    quantize_as,
)
from optax_ext.traced_graph import ELEMENTWISE, REDUCTIONS, Graph, called

Updated = tuple[Tree, LowPrecisionState]  # the updates, or the new parameters; and the state
InnerUpdate = Callable[[Tree, Any, Tree], tuple[Tree, Any]]


class StoredStep(NamedTuple):
    """One step of a transformation whose state is stored in low precision."""

    inner_update: InnerUpdate  # of updates, dequantized state and parameters
    apply: bool  # whether the step returns new parameters, not their updates
    shards: kernels.Shards  # on which kernels run
    in_kernels: bool = True  # whether those of its formats are right

    def at_once(self, updates: Tree, state: LowPrecisionState, params: Tree) -> Updated:
        """Computes the step operation by operation, in the order of Python."""
        flat, treedef = flatten(state.inner_state)
        old = [(path, x, _blocks_on(self.shards, path, x)) for path, x in flat]
        with jax.named_scope("low_precision"):
            moments = [dequantized(x, on) if isinstance(x, Quantized) else x for _, x, on in old]
        updates, new = self.inner_update(updates, treedef.unflatten(moments), params)
        key = next_key(state.key)
        with jax.named_scope("low_precision"):
            stored = [
                quantize_as(*was, leaf, key)
                for was, leaf in zip(old, treedef.flatten_up_to(new), strict=True)
            ]
        out = optax.apply_updates(params, updates) if self.apply else updates
        return out, LowPrecisionState(key, treedef.unflatten(stored))

    def by_leaf(self, updates: Tree, state: LowPrecisionState, params: Tree) -> Updated:
        """Computes the step leaf by leaf; in programs for TPUs, leaves that can be in one pass."""
        moments, treedef = flatten(state.inner_state)
        on_several = _matrix_passes.is_partitioned((updates, state)) and kernels.shards() is None
        # Mosaic has no int64, in which loops would count.
        x64 = jax.dtypes.canonicalize_dtype(jnp.int64) == jnp.int64
        if not self.in_kernels or on_several or x64 or not any(has_blocks(x) for _, x in moments):
            return self._in_form_of_xla(updates, state, params)
        # A kernel may close over no array that is traced here.
        inner_state = treedef.unflatten([dequantized_type(x) for _, x in moments])
        closed, consts, results = kernels.with_constants(
            self.inner_update, updates, inner_state, params
        )
        arguments = updates, state, params, consts
        in_passes = functools.partial(self._in_passes, closed, results)
        if self.shards.interpret:
            return in_passes(*arguments)
        made: Updated = kernels.for_tpus(in_passes, self._in_form_of_xla, *arguments)
        return made

    def _in_form_of_xla(
        self, updates: Tree, state: LowPrecisionState, params: Tree, _: Any = None
    ) -> Updated:
        step = functools.partial(self._replace(apply=False).at_once, params=params)
        updates, new = _scales_first(step, updates, state)
        return optax.apply_updates(params, updates) if self.apply else updates, new

    def _in_passes(
        self,
        closed: Any,
        results: Any,
        updates: Tree,
        state: Any,
        params: Tree,
        consts: list[Any],
        read_only: frozenset[int] = frozenset(),  # ids of arrays
    ) -> Updated:
        """Computes the step, whose inner update is this jaxpr, in one pass for each leaf."""

        def inner_update(*arguments: Tree) -> Any:
            made = jaxpr_as_fun(closed)(*consts, *jax.tree.leaves(arguments))
            return jax.tree.unflatten(results, made)

        step = self._replace(inner_update=inner_update)
        arguments = updates, state, params
        passes = OnePassUpdates(inner_update, self.apply, self.shards, *arguments, read_only)
        return _scales_first(functools.partial(step.at_once, params=params), updates, state, passes)


def _blocks_on(shards: kernels.Shards, path: Any, x: Array) -> Any:
    """Returns the blocks of a state array, with the rows of a shard; None for other arrays."""
    if not isinstance(x, Quantized) or isinstance(x.format, BFloat16):
        return None
    blocks = blocks_of(x)
    found = (shards.shape_of(path[i:], x.shape) for i in range(len(path) + 1))
    rows = next(filter(None, found), x.shape)[blocks.dims[0]]
    return dataclasses.replace(blocks, shard_rows=rows % x.shape[blocks.dims[0]])


# --- The order of a step: new scales before the codes that depend on them -------------------------

# Primitives that cost little more than reading their operands; not loops or matrix products.
_CHEAP = ELEMENTWISE | REDUCTIONS | {"broadcast_in_dim", "pad", "reshape", "slice", "squeeze"}


def _scales_first(
    step: Callable[[Tree, Any], Updated],
    updates: Tree,
    state: LowPrecisionState,
    passes: OnePassUpdates | None = None,
) -> Updated:
    """Computes a step leaf by leaf: otherwise XLA has float32 moments of all parameters live."""
    stored = [x for _, x in flatten(state.inner_state)[0] if isinstance(x, Quantized)]
    deferred = set(map(id, jax.tree.leaves(stored)))
    scales = {id(x) for q in stored for x in q.scale}
    make_run = functools.partial(ScalesFirst, scales=scales, passes=passes)
    return run_by_leaf(
        step, updates, state, lambda x: id(x) in deferred, make_run, kept=SHARED_TRACES
    )


class ScalesFirst(ScheduledRun):
    """Computes scales first, discards the moments, and computes these again for the codes."""

    def __init__(
        self,
        graph: Graph,  # the step
        inputs: Sequence[Any],  # gradients and state
        *,
        scales: Container[int],  # the ids of those inputs that are scales
        passes: OnePassUpdates | None = None,  # parameters that are updated in one pass instead
    ):
        super().__init__(graph, inputs)
        self._scales = {i for i, x in enumerate(inputs) if id(x) in scales}
        self._passes = passes

    # Codes need the scales of entire blocks: XLA would write the float32 moments in between.
    def run_group(self, outputs: list[int]) -> None:
        if self._passes is not None:
            for root in outputs:
                made = set(self._passes.outputs_of(root))
                if made and made <= set(outputs):
                    self.outputs |= self._passes.run(root)
                    outputs = [j for j in outputs if j not in made]
        if outputs:
            self._run_scales_first(outputs)
            super().run_group(outputs)

    def _run_scales_first(self, outputs: list[int]) -> None:
        """Computes new scales, then reads codes again, where the moments are cheap to compute."""
        graph = self.graph
        replaced = {j: graph.outputs[j] for j in outputs if self.replaces_deferred(j)}
        scales = [value for j, value in replaced.items() if j in self._scales]
        code_sizes = [
            math.prod(graph.shape(value)) for j, value in replaced.items() if j not in self._scales
        ]
        equations, _ = graph.needed(scales, self.values)
        least = min(code_sizes, default=0)

        def is_again(value: int) -> bool:
            return bool(graph.reads[value]) and math.prod(graph.shape(value)) >= least

        # Small values, such as sums, are kept.
        twice = [eqn for eqn in equations if any(map(is_again, eqn.results))]
        if scales and code_sizes and all(map(_is_cheap, twice)):
            sums = [v for e in equations if not _is_cheap(e) for v in e.results if graph.reads[v]]
            if sums:
                self._compute_and_discard(sums, is_again)
            self._compute_and_discard(scales, is_again)

    def _compute_and_discard(self, wanted: list[Any], is_again: Callable[[int], bool]) -> None:
        """Discards what is dequantized for these values; inputs among it are read a second time."""
        known = set(self.values)
        equations, _ = self.graph.needed(wanted, known)
        read = {value for eqn in equations for value in eqn.operands}
        known -= read - self.graph.producer.keys()  # inputs of earlier groups stay as they are
        self.compute(wanted)
        new = self.values.keys() - known - set(wanted)
        discarded = {value: self.values.pop(value) for value in new if is_again(value)}
        inputs = {i: x for i, x in discarded.items() if i not in self.graph.producer}
        self.values |= _matrix_passes.reread(inputs, [self.values[value] for value in wanted])


def _is_cheap(eqn: Any) -> bool:
    inner = called(eqn)
    if inner is None:
        return eqn.primitive.name in _CHEAP
    return all(map(_is_cheap, inner.eqns))
