"""The passes of a stack whose layers are updated as it runs backward.

A layer reads its parameters by its index, and hands their gradients on to ``StackUpdate``. All
micro-batches of a layer run before the next layer does.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from sharding.loss._effects import Prints, with_prints
from sharding.loss._evaluate import use
from sharding.loss._stack import Operand, ParamNumber, Result, Stack
from sharding.offload._host_memory import load_layer, on_host, scan_streamed
from sharding.step._global_gradients import GlobalLoss
from sharding.step._layer_updates import StackUpdate, as_stored

# Of a layer and its gradients: what to stack over layers.
Take = Callable[[StackUpdate, jax.Array, dict[ParamNumber, jax.Array]], Any]


class Microbatches(NamedTuple):
    """Micro-batches of a loss, whose values are stacked if there are several."""

    number: int
    sum_dtype: Callable[[Any], Any]  # in which gradients of a dtype are accumulated
    in_turn: bool  # whether one runs forward before the next does

    @property
    def dims(self) -> int:
        """How many dims of stacked values are before those of one."""
        return int(self.number > 1)

    def each(self, one: Callable[[Any], Any], given: Any) -> Any:
        """The results of each micro-batch, stacked."""
        if self.number == 1:
            return one(given)
        return lax.scan(lambda _, x: (None, one(x)), None, given, self.number)[1]

    def zeros(self, x: jax.Array) -> jax.Array:
        """The start of a sum of gradients of an array."""
        return jnp.zeros_like(x, None if self.number == 1 else self.sum_dtype(x.dtype))

    def run(self, one: Callable[[Any], tuple[Any, Any]], each: Any, zeros: Any) -> tuple[Any, Any]:
        """The sums of gradients, which start as ``zeros``, and the other results, stacked."""
        if self.number == 1:
            return one(each)

        def step(sums: Any, x: Any) -> tuple[Any, Any]:
            grads, out = one(x)
            return jax.tree.map(_added, sums, grads), out

        # Without the barrier XLA makes all zeros of the same shape at once, before the first sum.
        zero, each = lax.optimization_barrier((jnp.zeros((), jnp.int8), each))
        return lax.scan(step, jax.tree.map(lambda x: x + zero.astype(x.dtype), zeros), each)


def _added(total: jax.Array, x: jax.Array) -> jax.Array:
    return total + x.astype(total.dtype)


class StackPasses(NamedTuple):
    """How a stack runs where layers get their parameters from somewhere else than a slice."""

    stack: Stack
    loss: GlobalLoss  # gathers parameters, and reduces their gradients
    update: StackUpdate  # reads the parameters of layers, and takes their gradients
    frozen: dict[ParamNumber, jax.Array]  # untrained parameters that it slices, by itself
    stacked: frozenset[Operand] = frozenset()  # of which each micro-batch has its own

    def forward(
        self, operands: dict[Operand, Any], microbatches: Microbatches
    ) -> tuple[list[Any], dict[Operand, Any]]:
        """The results, and what enters each layer, stacked; see ``StackBackward``."""
        start = {k: x for k, x in operands.items() if k in self.stack.carried}
        for k in start if microbatches.dims else ():
            if k not in self.stacked:
                start[k] = jnp.broadcast_to(start[k], (microbatches.number, *jnp.shape(start[k])))
        step = functools.partial(self._layer_forward, operands, microbatches)
        carry, (entered, outs) = self.scan(step, start, backward=False)
        outs = [jnp.moveaxis(x, 0, microbatches.dims) for x in outs]  # ([microbatch,] layer, ...)
        return [*carry.values(), *outs], entered

    def _layer_forward(
        self, operands: dict[Operand, Any], microbatches: Microbatches, carry: Any, layer: jax.Array
    ) -> tuple[dict[Operand, Any], Any]:
        """All micro-batches of a layer: what is carried, and what is stacked."""
        held = self.read(layer)
        same, own = self.of_layer(layer, operands, microbatches)

        def one(each: dict[Operand, Any]) -> Any:
            out = self.run_layer(held, {}, same | each, Prints.ALL)
            return dict(zip(carry, out, strict=False)), out[len(carry) :]

        after, outs = microbatches.each(one, own | carry)
        return after, (carry, outs)

    def scan(self, step: Any, carry: Any, backward: bool) -> Any:
        """A loop over the indices of layers, from the last one on in the backward pass."""
        options = self.stack.scan.options
        order = {"reverse": options["reverse"] != backward, "unroll": options["unroll"]}
        layers = jnp.arange(options["length"])
        return scan_streamed(self.update.streamed, step, carry, layers, writes=backward, **order)

    def read(self, layer: jax.Array) -> dict[ParamNumber, jax.Array]:
        """The parameters of a layer, in the dtypes that the loss gets."""
        held = self.update.read(layer)
        for i, stack in self.frozen.items():
            held[i] = load_layer(stack, layer)
            if on_host(stack):
                spec = self.loss.leaves[i].of_slice(self.loss.leaves[i].held, stack.ndim - 1)
                held[i] = as_stored(self.loss.layout, held[i], spec)
        return {i: x.astype(self.loss.leaves[i].dtype) for i, x in held.items()}

    def of_layer(
        self, layer: jax.Array, operands: dict[Operand, Any], microbatches: Microbatches
    ) -> tuple[dict[Operand, Any], dict[Operand, Any]]:
        """What a layer gets, but for what is carried: the same, and one each of micro-batches."""
        dims = {k: microbatches.dims * (k in self.stacked) for k in operands}
        args = {
            k: x if k < self.stack.carried.start else at_layer(layer, x, dims[k])
            for k, x in operands.items()
            if k not in self.stack.carried
        }
        own = {k: args.pop(k) for k in self.stacked & args.keys()}
        return args, own

    def run_layer(
        self,
        held: dict[ParamNumber, jax.Array],
        taps: dict[ParamNumber, jax.Array],
        operands: dict[Operand, Any],
        prints: Prints,
    ) -> list[Any]:
        """The outputs of the body; ``taps`` are differentiated in the place of ``held``."""
        leaves, own = self.loss.leaves, {}
        for k, view in self.stack.own.items():
            cast = view.cast(held[view.param])
            own[k] = view.change(use(leaves[view.param], cast, taps.get(view.param)))
        args = operands | own
        run = jaxpr_as_fun(with_prints(self.stack.scan.body, prints))
        return list(run(*(args[k] for k in sorted(args))))


class StackBackward(NamedTuple):
    """The backward pass of a stack, layer by layer from the last to the first.

    A layer is computed again from what entered it. Cotangents of what is carried are handed to the
    layer before it, those of constants summed over layers, those of slices stacked.
    """

    passes: StackPasses
    operands: dict[Operand, Any]  # without what is carried
    # What the forward pass stacked: (layer, ...), of several micro-batches (layer, microbatch, ...)
    # or, if they ran in turn, (microbatch, layer, ...).
    entered: dict[Operand, Any]
    cotangents: dict[Result, Any]  # of the results on which the loss depends
    by: list[Operand]  # that are differentiated
    microbatches: Microbatches
    prints: Prints  # of layers, which run again

    def run(self, take: Take) -> tuple[dict[Operand, Any], Any]:
        """Cotangents of operands, and what ``take`` returns for each layer, stacked."""
        step = functools.partial(self._layer, take)
        (after, sums), (taken, slices) = self.passes.scan(step, self._start(), backward=True)
        dims = {k: self.microbatches.dims * (k in self.passes.stacked) for k in slices}
        slices = {k: jnp.moveaxis(x, 0, dims[k]) for k, x in slices.items()}
        return after | sums | slices, taken

    @property
    def _carried(self) -> dict[Operand, Result]:
        """Of what is carried and differentiated, what it is after the last layer."""
        carried = self.passes.stack.carried
        return {k: Result(k - carried.start) for k in self.by if k in carried}

    @property
    def _stacked_results(self) -> dict[Result, Any]:
        """Cotangents of the results that the loop stacks: ([microbatch,] layer, ...)."""
        num_carry = self.passes.stack.scan.num_carry
        return {j: x for j, x in self.cotangents.items() if j >= num_carry}

    @property
    def _layer_dim(self) -> int:
        """Of ``entered``."""
        return self.microbatches.dims * self.microbatches.in_turn

    def _start(self) -> tuple[dict[Operand, Any], dict[Operand, Any]]:
        """Cotangents of what the last layer carries on, and the sums for constants: zeros."""
        after = {}
        for k, j in self._carried.items():
            if j in self.cotangents:
                after[k] = self.cotangents[j]
            else:
                x = lax.index_in_dim(self.entered[k], 0, self._layer_dim, keepdims=False)
                after[k] = jnp.zeros_like(x)
        sums, of_each = {}, self.passes.stacked
        for k in (k for k in self.by if k < self.passes.stack.carried.start):
            x = self.operands[k]
            sums[k] = jnp.zeros_like(x) if k in of_each else self.microbatches.zeros(x)
        return after, sums

    def _layer(self, take: Take, carry: Any, layer: jax.Array) -> tuple[Any, Any]:
        """A step of the loop: all micro-batches of a layer, whose gradients ``take`` gets."""
        passes, microbatches, (after, sums) = self.passes, self.microbatches, carry
        # What enters the layer, and the cotangents of what it stacks.
        held = passes.read(layer)
        same, each = passes.of_layer(layer, self.operands, microbatches)
        each |= {k: at_layer(layer, x, self._layer_dim) for k, x in self.entered.items()}
        later = {j: at_layer(layer, x, microbatches.dims) for j, x in self._stacked_results.items()}
        # Gradients are summed over micro-batches, as are cotangents of what all of them share.
        dtype = microbatches.sum_dtype
        own = {i: held[i] for i in passes.update.of}
        zeros = (
            {i: passes.loss.leaves[i].tap(x.shape, dtype(x.dtype)) for i, x in own.items()},
            {k: microbatches.zeros(x) for k, x in same.items() if k in self.by},
        )
        taps = {i: passes.loss.leaves[i].tap(x.shape) for i, x in own.items()}
        one = functools.partial(self._microbatch, held, taps, same)
        (grads, given), of_each = microbatches.run(one, (each, after, later), zeros)
        # On to the layer before it, to the sums over layers, and to the stacks.
        given |= of_each
        sums = {k: x + given[k].astype(x.dtype) for k, x in sums.items()}
        slices = {k: given[k] for k in self.by if k >= passes.stack.carried.stop}
        return ({k: given[k] for k in after}, sums), (take(passes.update, layer, grads), slices)

    def _microbatch(
        self,
        held: dict[ParamNumber, Any],
        taps: dict[ParamNumber, Any],
        same: dict[Operand, Any],
        each: tuple[dict[Operand, Any], dict[Operand, Any], dict[Result, Any]],
    ) -> tuple[tuple[dict[ParamNumber, Any], dict[Operand, Any]], dict[Operand, Any]]:
        """What is summed over micro-batches: gradients, cotangents of ``same``; and the others."""
        own, after, later = each
        args = same | own
        results = [*self._carried.values(), *self._stacked_results]

        def run(taps: dict[ParamNumber, Any], given: dict[Operand, Any]) -> list[Any]:
            outs = self.passes.run_layer(held, taps, args | given, self.prints)
            return [outs[j] for j in results]

        given = {k: args[k] for k in self.by}
        _, vjp = jax.vjp(run, taps, given)
        grads, found = vjp([*after.values(), *later.values()])
        shared = self.operands.keys() - self.passes.stacked
        of_all = {k: x for k, x in found.items() if k in shared}
        return (grads, of_all), {k: x for k, x in found.items() if k not in shared}


def at_layer(layer: jax.Array, x: jax.Array, dim: int) -> jax.Array:
    """One layer of an array whose layers are along a dim."""
    return lax.dynamic_index_in_dim(x, layer, dim, keepdims=False)
