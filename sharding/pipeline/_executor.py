"""One program for every schedule: loops over ticks, in each a branch, then messages to neighbours.

Runs inside a ``shard_map`` over the pipeline's axis.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharding._types import Array, Batch, Tree
from sharding.pipeline._instructions import Code, Instructions, Phase, Segment
from sharding.pipeline._operations import Op
from sharding.pipeline._schedule import Schedule
from sharding.pipeline._stage import Arrays, LayerParams, Scope, Stage
from sharding.step._gather_and_reduce import gather
from sharding.step._loss import join_microbatches

if TYPE_CHECKING:
    from sharding.pipeline._pipeline import Pipeline


class Totals(NamedTuple):
    """Sums over micro-batches, of one stage."""

    sum: Any  # of losses
    weight: Any  # of examples or tokens
    aux: Any  # leaves [micro-batches, ...]


class Buffers(NamedTuple):
    """What a stage stores between ticks; refs while it runs."""

    messages: Any  # activations and cotangents, leaves [slots + 1, ...]
    residuals: Arrays  # [slots + 1, layers, ...], from forward to backward passes
    crossing: Arrays  # [slots + 1, layers, ...], between the halves of split backward passes
    layer_grads: Any  # of the trained parameters, [chunks * layers, ...]
    shared_grads: Any  # of the trained shared parameters
    totals: Totals
    versions: Any = ()  # of the parameters, in an asynchronous pipeline
    opt_state: Any = ()  # of the optimizer there


def read(refs: Tree, i: Any = ...) -> Any:
    """The values of a tree of refs or arrays, or the slot or rows of each that an index names."""
    # A ref without elements takes no index since jax 0.12.
    of = lambda ref: ref if all(ref.shape) else jnp.zeros(ref.shape, ref.dtype)  # noqa: E731
    return jax.tree.map(lambda ref: of(ref)[i], refs)


def write(refs: Tree, new: Tree, i: Any = ...) -> None:
    _change(jax.ref.set, refs, new, i)


def add(refs: Tree, new: Tree, i: Any = ...) -> None:
    _change(jax.ref.addupdate, refs, new, i)


def _change(method: Callable[..., Any], refs: Tree, new: Tree, i: Any) -> None:
    def change(ref: Any, x: Any) -> None:
        if all(ref.shape):  # as in ``read``
            method(ref, i, jnp.asarray(x, ref.dtype))

    jax.tree.map(change, refs, new)


def sum_totals(totals: Totals, axis: str) -> tuple[tuple[Any, Any], Any]:
    """``((sum, weight), aux)`` over all stages, the micro-batches of ``aux`` joined."""
    sum_, weight, aux = lax.psum(totals, axis)
    aux = jax.tree.map(lambda x, one: x.astype(one.dtype), aux, totals.aux)
    return (sum_, weight), jax.tree.map(join_microbatches, aux)


Column = dict[str, jax.Array]  # of one tick and stage: see Segment.tables
Params = tuple[LayerParams, LayerParams]  # the layers of one chunk, and the shared parameters
# Of an operation: its message, None if nobody uses it; and by field of ``Buffers``, what it stores
# there for a later one of its stage, [layers, ...]. That leaves the branch as a value: slots that a
# branch wrote would be copied in every tick by XLA's compilers for CPUs and GPUs, and be in memory
# twice. Sums of gradients are written in the branch: a value would be as large as they are.
Result = tuple[Any, dict[str, Arrays]]


@dataclasses.dataclass
class Executor:
    pipeline: "Pipeline"
    schedule: Schedule
    program: Instructions
    layers: LayerParams  # of all chunks of this stage, [chunks * layers, ...]
    shared: LayerParams  # of embedding and head
    microbatches: Any  # a tree of [micro-batches, ...]
    key: Any  # of the step; None without random numbers

    def run(self, tables: Sequence[Column], buffers: Buffers | None = None) -> Buffers:
        """Runs all ticks: for each segment, this stage's columns [iterations, phases, 1]."""
        self.buffers = jax.tree.map(jax.new_ref, buffers or self._empty_buffers())
        for segment, table in zip(self.program.segments, tables, strict=True):
            columns = {name: x[..., 0] for name, x in table.items()}
            lax.scan(functools.partial(self._iteration, segment), None, columns)
        return jax.tree.map(jax.freeze, self.buffers)

    def _iteration(self, segment: Segment, _: None, columns: Column) -> tuple[None, None]:
        for i, phase in enumerate(segment.phases):
            self._tick(phase, {k: v[i] for k, v in columns.items()})
        return None, None

    def _tick(self, phase: Phase, column: Column) -> None:
        """One operation of this stage, then the messages of all stages."""
        operations = self._operations()
        buffers = self.buffers
        no_message = self._no_message()
        # Zeros of all that some operation of the phase stores: branches return one type.
        zeros = {
            kind: [jnp.zeros(ref.shape[1:], ref.dtype) for ref in getattr(buffers, kind)]
            for kind in sorted(set().union(*map(self._stores, phase.codes)))
        }

        def branch(code: Code | None) -> Result:
            if code is None:
                return no_message, zeros
            message, later = operations[code.op](code, column)
            return no_message if message is None else message, zeros | later

        branches = [functools.partial(branch, code) for code in (None, *phase.codes)]
        message, later = lax.switch(column["code"], branches)
        with jax.named_scope("store"):  # where nothing is for later, in a slot of no use
            for kind, values in later.items():
                write(getattr(buffers, kind), values, column[f"to_{kind}"])
        with jax.named_scope("messages"):
            for pairs, slot in ((phase.right, "from_left"), (phase.left, "from_right")):
                if pairs:
                    arrived = lax.ppermute(message, self.pipeline.axis, pairs)
                    write(buffers.messages, arrived, column[slot])
            if phase.stays:
                write(buffers.messages, message, column["from_self"])

    def _operations(self) -> dict[Op, Callable[[Code, Column], Result]]:
        return {Op.FORWARD: self._forward, Op.BACKWARD: self._backward, Op.WEIGHT: self._weight}

    def _stores(self, code: Code) -> set[str]:
        """The fields of ``Buffers`` for which an operation returns values."""
        if code.op == Op.FORWARD:
            stores = not (self.pipeline.recompute or code.last or self.schedule.forward_only)
            return {"residuals"} if stores else set()
        return {"crossing"} if code.op == Op.BACKWARD and self.schedule.splits_backward else set()

    # --- Operations -------------------------------------------------------------------------------

    def _forward(self, code: Code, column: Column) -> Result:
        evaluating = self.schedule.forward_only
        if code.last and not evaluating:
            return None, {}  # the first half of its backward pass
        scope = self._scope(column)
        params, shared = self._params(code, column)
        with jax.named_scope("forward"):
            x = self._input(code, column, scope, shared)
            if code.last:
                sum_, others = self._head(shared, self.stage.forward(params, x, scope), scope)
                self._add_totals(column, Totals(sum_, *others))
                return None, {}
            if self.pipeline.recompute or evaluating:
                return self.stage.forward(params, x, scope), {}
            y, residuals = self.stage.forward_storing(params, x, scope)
            return y, {"residuals": residuals}

    def _backward(self, code: Code, column: Column) -> Result:
        scope = self._scope(column)
        params, shared = self._params(code, column)
        if self.pipeline.recompute or code.last:
            with jax.named_scope("forward"):
                x = self._input(code, column, scope, shared)
                y, residuals = self.stage.forward_storing(params, x, scope)
        else:
            residuals = read(self.buffers.residuals, column["residual"])

        later: dict[str, Arrays] = {}
        with jax.named_scope("backward"):
            # The cotangent of the stage's output: from the head, or from the next stage.
            if code.last:

                def head(trained: Tree, y: Any) -> Any:
                    return self._head(shared._replace(trained=trained), y, scope)

                sum_, vjp, others = jax.vjp(head, shared.trained, y, has_aux=True)
                grads, cotangent = vjp(jnp.ones_like(sum_))
                self._add_totals(column, Totals(sum_, *others))
                add(self.buffers.shared_grads, grads)
            else:
                cotangent = read(self.buffers.messages, column["cotangent"])
            # Through the layers.
            if self.schedule.splits_backward:
                cotangent, crossing = self.stage.backward_input(params, residuals, cotangent, scope)
                later["crossing"] = crossing
            else:
                cotangent, grads = self.stage.backward(params, residuals, cotangent, scope)
                self._add_layer_grads(column, grads)
            if not code.first:
                return cotangent, later

            def embed(trained: Tree) -> Any:
                return self._embed(shared._replace(trained=trained), scope)

            (grads,) = jax.vjp(embed, shared.trained)[1](cotangent)
            add(self.buffers.shared_grads, grads)
            return None, later

    def _weight(self, code: Code, column: Column) -> Result:
        with jax.named_scope("backward"):
            crossing = read(self.buffers.crossing, column["crossing"])
            scope = self._scope(column)
            params, _ = self._params(code, column)
            self._add_layer_grads(column, self.stage.backward_weight(params, crossing, scope))
            return None, {}

    # --- The model --------------------------------------------------------------------------------

    @functools.cached_property
    def stage(self) -> Stage:
        counts = self.pipeline.layer_counts
        return Stage(self._layer, max(counts), uneven=min(counts) < max(counts))

    def _layer(self, params: LayerParams, x: Array, microbatch: Batch, key: Any) -> Any:
        tree = gather(params.tree)  # unless the step has gathered them already
        return self.pipeline.block(tree, x, microbatch, *([] if key is None else [key]))

    def _embed(self, shared: LayerParams, scope: Scope) -> Any:
        return self.pipeline.embed(shared.tree, *self._args(scope, 0))

    def _head(self, shared: LayerParams, x: Array, scope: Scope) -> tuple[Any, tuple[Any, Any]]:
        """``(sum, (weight, aux))``."""
        out = self.pipeline.head(shared.tree, x, *self._args(scope, 1))
        (sum_, weight), aux = out if self.pipeline.has_aux else (out, ())
        return jnp.asarray(sum_), (lax.stop_gradient(jnp.asarray(weight)), aux)

    def _args(self, scope: Scope, number: int) -> tuple[Any, ...]:
        """The micro-batch, and a key that comes after those of the layers."""
        if scope.key is None:
            return (scope.microbatch,)
        number += sum(self.pipeline.layer_counts)
        return scope.microbatch, jax.random.fold_in(scope.key, number)

    # --- What operations read and write -----------------------------------------------------------

    def _scope(self, column: Column) -> Scope:
        counts = np.array(self.pipeline.layer_counts, np.int32)
        starts = (np.cumsum(counts) - counts).astype(np.int32)
        v = column["virtual_stage"]
        key = self.key
        if key is not None:
            key = jax.random.fold_in(key, column["microbatch"])
        microbatch = read(self.microbatches, column["microbatch"])
        return Scope(microbatch, key, jnp.asarray(starts)[v], jnp.asarray(counts)[v])

    def _input(self, code: Code, column: Column, scope: Scope, shared: LayerParams) -> Any:
        if code.first:
            return self._embed(shared, scope)
        return read(self.buffers.messages, column["input"])

    def _params(self, code: Code, column: Column) -> Params:
        return self._chunk_of(self.layers, column), self.shared

    def _chunk_of(self, tree: Tree, column: Column) -> Any:
        """[chunks * layers, ...] to [layers, ...]."""
        size = self.stage.num_layers
        if self.schedule.num_chunks == 1:
            return tree
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, column["chunk"] * size, size), tree
        )

    def _add_layer_grads(self, column: Column, grads: Tree) -> None:
        """Adds gradients of one chunk, [layers, ...]."""
        # A sum inside the loop over layers would copy all sums into the loop and out of it.
        size = self.stage.num_layers
        own = jax.ds(column["chunk"] * size, size) if self.schedule.num_chunks > 1 else ...
        add(self.buffers.layer_grads, grads, own)

    def _add_totals(self, column: Column, new: Totals) -> None:
        totals = self.buffers.totals
        add(totals[:2], new[:2], self._sums_of(column))
        write(totals.aux, new.aux, column["microbatch"])

    def _sums_of(self, column: Column) -> Any:
        """The index of a micro-batch's sum and weight in the totals, which are scalars."""
        return ...

    # --- Shapes -----------------------------------------------------------------------------------

    @functools.cached_property
    def _types(self) -> tuple[Any, Arrays, Arrays, Any]:
        """Types of a message, a stage's residuals and crossing values, and the head's result."""
        column = {name: jnp.zeros((), jnp.int32) for name in self.program.segments[0].tables}

        def every() -> Any:
            scope = self._scope(column)
            params = self._chunk_of(self.layers, column)
            x = self._embed(self.shared, scope)
            one = jax.tree.map(lambda leaf: leaf[0], params)
            _check_activations(x, self._layer(one, x, scope.microbatch, scope.key))
            out = self._head(self.shared, x, scope)
            if self.schedule.forward_only:
                return x, [], [], out
            y, residuals = self.stage.forward_storing(params, x, scope)
            crossing: Arrays = []
            if self.schedule.splits_backward:
                _, crossing = self.stage.backward_input(params, residuals, y, scope)
            return x, residuals, crossing, out

        return jax.eval_shape(every)

    def _no_message(self) -> Any:
        return jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), self._types[0])

    def _empty_buffers(self) -> Buffers:
        message, residuals, crossing, (sum_, (weight, aux)) = self._types
        program = self.program

        def slots(types: Any, count: int) -> Any:
            return jax.tree.map(lambda t: jnp.zeros((count, *t.shape), t.dtype), types)

        def zeros(t: Any) -> jax.Array:  # of a sum over micro-batches: at least float32
            return jnp.zeros(t.shape, jnp.promote_types(t.dtype, jnp.float32))

        return Buffers(
            slots(message, program.num_messages + 1),
            slots(residuals, program.num_residuals + 1) if program.num_residuals else [],
            slots(crossing, program.num_crossing + 1) if program.num_crossing else [],
            jax.tree.map(zeros, self.layers.trained),
            jax.tree.map(zeros, self.shared.trained),
            Totals(zeros(sum_), zeros(weight), slots(aux, self.schedule.num_microbatches)),
        )


def _check_activations(embedded: Any, after_layer: Any) -> None:
    """Raises unless a layer returns what it takes, in arrays that have cotangents."""
    types = [
        jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x).name), tree)
        for tree in (embedded, after_layer)
    ]
    if types[0] != types[1]:
        raise ValueError(
            "embed and block must return activations of one type, because all stages run one "
            f"program: embed returned (shape, dtype) {types[0]}, block {types[1]}."
        )
    for x in jax.tree.leaves(embedded):
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise ValueError(
                f"activations must be floating-point arrays, got {jnp.result_type(x)}. Layers can "
                "read integers from the micro-batch, which each stage has."
            )
