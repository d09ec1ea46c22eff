"""One program for every schedule: loops over ticks, in each a branch, then messages to neighbours.

Runs inside a ``shard_map`` over the pipeline's axis.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharding.pipeline._buffers import Buffers, Ends, Found, Totals, read_slot, write_slot
from sharding.pipeline._instructions import Code, Instructions, Phase, Segment
from sharding.pipeline._ops import Op
from sharding.pipeline._schedule import Schedule
from sharding.pipeline._stage import Arrays, LayerParams, Scope, Stage

Column = dict[str, jax.Array]  # of one tick and stage: see Segment.tables
Operation = Callable[[Code, Buffers, Column], tuple[Any, Found, Buffers]]


@dataclasses.dataclass
class Executor:
    """One stage of a pipeline.

    Attributes:
      schedule: the table.
      program: its instructions.
      stage: the layers of a virtual stage.
      ends: embedding and head.
      layer_counts: layers of every virtual stage.
      recompute: whether backward passes compute their forward pass again.
      axis: of the mesh.
    """

    schedule: Schedule
    program: Instructions
    stage: Stage
    ends: Ends
    layer_counts: tuple[int, ...]
    recompute: bool
    axis: str

    def run(
        self,
        layers: LayerParams,
        shared: LayerParams,
        microbatches: Any,
        key: Any,
        tables: Sequence[dict[str, jax.Array]],
    ) -> Buffers:
        """All ticks.

        Args:
          layers: of all chunks of this stage, [chunks * layers, ...].
          shared: parameters of embedding and head.
          microbatches: a tree of [micro-batches, ...].
          key: of the step; None without random numbers.
          tables: of each segment, this stage's columns, [iterations, phases].

        Returns:
          The buffers after the last tick.
        """
        self._layers, self._shared = layers, shared
        self._microbatches, self._key = microbatches, key
        return self._run(self._empty_buffers(), tables)

    def _run(self, buffers: Buffers, tables: Sequence[dict[str, jax.Array]]) -> Buffers:
        for segment, columns in zip(self.program.segments, tables, strict=True):
            buffers, _ = lax.scan(functools.partial(self._iteration, segment), buffers, columns)
        return buffers

    def _iteration(
        self, segment: Segment, buffers: Buffers, columns: Column
    ) -> tuple[Buffers, None]:
        for i, phase in enumerate(segment.phases):
            buffers = self._tick(phase, buffers, {k: v[i] for k, v in columns.items()})
        return buffers, None

    def _tick(self, phase: Phase, buffers: Buffers, column: Column) -> Buffers:
        """One operation of this stage, then the messages of all stages."""
        run = self._operations()
        # A branch gets what any of the phase writes; what it only reads, it closes over.
        written = sorted(set().union(*(self._written(code) for code in phase.codes)))
        nothing = self._no_message()
        zeros = self._nothing_found(buffers, phase)

        def branch(code: Code | None, parts: dict[str, Any]) -> tuple[Any, Found, dict[str, Any]]:
            if code is None:
                return nothing, zeros, parts
            message, found, new = run[code.op](code, buffers._replace(**parts), column)
            found = Found(*(f if f is not None else z for f, z in zip(found, zeros, strict=True)))
            message = nothing if message is None else message
            return message, found, {k: getattr(new, k) for k in parts}

        branches = [functools.partial(branch, code) for code in (None, *phase.codes)]
        parts = {name: getattr(buffers, name) for name in written}
        message, found, parts = lax.switch(column["code"], branches, parts)
        buffers = self._stored(buffers._replace(**parts), found, column)

        messages = buffers.messages
        with jax.named_scope("messages"):
            if phase.right:
                arrived = lax.ppermute(message, self.axis, phase.right)
                messages = write_slot(messages, column["from_left"], arrived)
            if phase.left:
                arrived = lax.ppermute(message, self.axis, phase.left)
                messages = write_slot(messages, column["from_right"], arrived)
            if phase.stays:
                messages = write_slot(messages, column["from_self"], message)
        return buffers._replace(messages=messages)

    def _operations(self) -> dict[Op, Operation]:
        return {Op.FORWARD: self._forward, Op.BACKWARD: self._backward, Op.WEIGHT: self._weight}

    def _written(self, code: Code) -> set[str]:
        """The buffers that an operation returns."""
        if code.op == Op.FORWARD:
            return {"totals"} if code.last and self.schedule.forward_only else set()
        if code.op == Op.WEIGHT:
            return {"layer_grads"}
        sums = set() if self.schedule.splits_backward else {"layer_grads"}
        sums |= {"totals"} if code.last else set()
        return sums | ({"shared_grads"} if code.first or code.last else set())

    def _finds(self, code: Code) -> set[str]:
        """What an operation finds; see ``Found``."""
        if code.op == Op.FORWARD:
            stores = not (self.recompute or code.last or self.schedule.forward_only)
            return {"residuals"} if stores else set()
        return {"crossing"} if code.op == Op.BACKWARD and self.schedule.splits_backward else set()

    def _nothing_found(self, buffers: Buffers, phase: Phase) -> Found:
        """Zeros of all that some operation of a phase finds."""
        some = set().union(*(self._finds(code) for code in phase.codes))
        slots = {"residuals": buffers.residuals, "crossing": buffers.crossing}
        return Found(**{name: [jnp.zeros_like(x[0]) for x in slots[name]] for name in some})

    def _stored(self, buffers: Buffers, found: Found, column: Column) -> Buffers:
        """The buffers with what an operation found; where it found none, in a slot of no use."""
        with jax.named_scope("store"):
            for name, values in found._asdict().items():
                if values is not None:
                    slots = write_slot(getattr(buffers, name), column[f"to_{name}"], values)
                    buffers = buffers._replace(**{name: slots})
        return buffers

    # --- Operations: (code, buffers, column) -> (message, found, buffers) -------------------------

    def _forward(self, code: Code, buffers: Buffers, column: Column) -> tuple[Any, Found, Buffers]:
        evaluating = self.schedule.forward_only
        if code.last and not evaluating:
            return None, Found(), buffers  # the first half of its backward pass
        scope, (params, shared) = self._scope(column), self._params(code, buffers, column)
        with jax.named_scope("forward"):
            x = self._input(code, buffers, column, scope, shared)
            if code.last:
                y = self.stage.forward(params, x, scope)
                sum_, rest = self.ends.head(self.ends.join(*shared), y, *self._of_head(scope))
                return None, Found(), self._with_totals(buffers, column, sum_, rest)
            if self.recompute or evaluating:
                return self.stage.forward(params, x, scope), Found(), buffers
            y, residuals = self.stage.forward_storing(params, x, scope)
            return y, Found(residuals=residuals), buffers

    def _backward(self, code: Code, buffers: Buffers, column: Column) -> tuple[Any, Found, Buffers]:
        scope, (params, shared) = self._scope(column), self._params(code, buffers, column)
        if self.recompute or code.last:
            with jax.named_scope("forward"):
                x = self._input(code, buffers, column, scope, shared)
                y, residuals = self.stage.forward_storing(params, x, scope)
        else:
            residuals = read_slot(buffers.residuals, column["residual"])

        found = Found()
        with jax.named_scope("backward"):
            if code.last:

                def head(trained: Arrays, y: Any) -> Any:
                    whole = self.ends.join(trained, shared.frozen)
                    return self.ends.head(whole, y, *self._of_head(scope))

                sum_, vjp, rest = jax.vjp(head, shared.trained, y, has_aux=True)
                grads, cotangent = vjp(jnp.ones_like(sum_))
                buffers = self._with_totals(buffers, column, sum_, rest)
                buffers = buffers._replace(shared_grads=_add(buffers.shared_grads, grads))
            else:
                cotangent = read_slot(buffers.messages, column["cotangent"])
            if self.schedule.splits_backward:
                cotangent, crossing = self.stage.backward_input(params, residuals, cotangent, scope)
                found = Found(crossing=crossing)
            else:
                cotangent, grads = self.stage.backward(params, residuals, cotangent, scope)
                buffers = self._with_layer_grads(buffers, column, grads)
            if code.first:

                def embed(trained: Arrays) -> Any:
                    whole = self.ends.join(trained, shared.frozen)
                    return self.ends.embed(whole, *self._of_embed(scope))

                (grads,) = jax.vjp(embed, shared.trained)[1](cotangent)
                buffers = buffers._replace(shared_grads=_add(buffers.shared_grads, grads))
            return None if code.first else cotangent, found, buffers

    def _weight(self, code: Code, buffers: Buffers, column: Column) -> tuple[Any, Found, Buffers]:
        with jax.named_scope("backward"):
            crossing = read_slot(buffers.crossing, column["crossing"])
            scope, (params, _) = self._scope(column), self._params(code, buffers, column)
            found = self.stage.backward_weight(params, crossing, scope)
            return None, Found(), self._with_layer_grads(buffers, column, found)

    # --- What operations read and write -----------------------------------------------------------

    def _scope(self, column: Column) -> Scope:
        starts = np.concatenate([[0], np.cumsum(self.layer_counts)[:-1]]).astype(np.int32)
        v, key = column["virtual_stage"], self._key
        if key is not None:
            key = jax.random.fold_in(key, column["microbatch"])
        return Scope(
            read_slot(self._microbatches, column["microbatch"]),
            key,
            jnp.asarray(starts)[v],
            jnp.asarray(self.layer_counts, jnp.int32)[v],
        )

    def _of_embed(self, scope: Scope) -> tuple[Any, Any]:
        """The micro-batch, and the key of the embedding: after those of the layers."""
        return scope.microbatch, _fold_key(scope.key, sum(self.layer_counts))

    def _of_head(self, scope: Scope) -> tuple[Any, Any]:
        return scope.microbatch, _fold_key(scope.key, sum(self.layer_counts) + 1)

    def _input(
        self, code: Code, buffers: Buffers, column: Column, scope: Scope, shared: LayerParams
    ) -> Any:
        if code.first:
            return self.ends.embed(self.ends.join(*shared), *self._of_embed(scope))
        return read_slot(buffers.messages, column["input"])

    def _params(
        self, code: Code, buffers: Buffers, column: Column
    ) -> tuple[LayerParams, LayerParams]:
        """The layers of one chunk, and the shared parameters."""
        del code, buffers
        return LayerParams(*(self._chunk_of(x, column) for x in self._layers)), self._shared

    def _chunk_of(self, arrays: Arrays, column: Column) -> Arrays:
        """The rows of one chunk, [layers, ...]."""
        size = self.stage.num_layers
        if self.schedule.num_chunks == 1:
            return arrays
        return [lax.dynamic_slice_in_dim(x, column["chunk"] * size, size) for x in arrays]

    def _with_layer_grads(self, buffers: Buffers, column: Column, found: Arrays) -> Buffers:
        """Adds gradients of one chunk, [layers, ...].

        A sum inside the loop over layers would copy all sums into the loop and out of it.
        """
        sums = _add(self._chunk_of(buffers.layer_grads, column), found)
        if self.schedule.num_chunks > 1:
            start = column["chunk"] * self.stage.num_layers
            sums = [
                lax.dynamic_update_slice_in_dim(x, new, start, 0)
                for x, new in zip(buffers.layer_grads, sums, strict=True)
            ]
        return buffers._replace(layer_grads=sums)

    def _with_totals(self, buffers: Buffers, column: Column, sum_: Any, rest: Any) -> Buffers:
        weight, aux = rest
        totals = buffers.totals
        return buffers._replace(
            totals=Totals(
                totals.sum + sum_,
                totals.weight + weight,
                write_slot(totals.aux, column["microbatch"], aux),
            )
        )

    # --- Shapes -----------------------------------------------------------------------------------

    def _abstract(self) -> tuple[Any, Arrays, Arrays, Any]:
        """Types of a message, the residuals and crossing values of a stage, and the head's result.

        Raises:
          ValueError: if embedding and layers do not return activations of one type.
        """
        column = {name: jnp.zeros((), jnp.int32) for name in self.program.segments[0].tables}

        def every() -> Any:
            scope, shared = self._scope(column), self.ends.join(*self._shared)
            params = LayerParams(*(self._chunk_of(x, column) for x in self._layers))
            x = self.ends.embed(shared, *self._of_embed(scope))
            one = LayerParams(*([leaf[0] for leaf in part] for part in params))
            after = self.stage.layer(one, x, *self._of_embed(scope))
            _check_activations(x, after)
            out = self.ends.head(shared, x, *self._of_head(scope))
            if self.schedule.forward_only:
                return x, [], [], out
            y, residuals = self.stage.forward_storing(params, x, scope)
            crossing: Arrays = []
            if self.schedule.splits_backward:
                _, crossing = self.stage.backward_input(params, residuals, y, scope)
            return x, residuals, crossing, out

        return jax.eval_shape(every)

    def _no_message(self) -> Any:
        return jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), self._message_type)

    def _empty_buffers(self) -> Buffers:
        message, residuals, crossing, (sum_, (weight, aux)) = self._abstract()
        self._message_type = message
        program, evaluating = self.program, self.schedule.forward_only

        def slots(types: Any, count: int) -> Any:
            return jax.tree.map(lambda t: jnp.zeros((count, *t.shape), t.dtype), types)

        def sums(params: LayerParams) -> Arrays:
            # At least float32: a sum over micro-batches.
            return [
                jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in params.trained
            ]

        def total(t: Any) -> jax.Array:
            return jnp.zeros((), jnp.promote_types(t.dtype, jnp.float32))

        return Buffers(
            slots(message, program.num_messages + 1),
            slots(residuals, program.num_residuals + 1) if program.num_residuals else [],
            slots(crossing, program.num_crossing + 1) if program.num_crossing else [],
            [] if evaluating else sums(self._layers),
            [] if evaluating else sums(self._shared),
            Totals(total(sum_), total(weight), slots(aux, self.schedule.num_microbatches)),
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


def _fold_key(key: Any, number: int) -> Any:
    return None if key is None else jax.random.fold_in(key, number)


def _add(sums: Arrays, found: Arrays) -> Arrays:
    return [s + x.astype(s.dtype) for s, x in zip(sums, found, strict=True)]
