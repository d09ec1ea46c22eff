"""The layers of one virtual stage: their forward pass, and the backward pass, full or split."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.traced_graph import Graph, evaluate
from sharding._types import Array, Tree

Arrays = list[Any]


class LayerParams(NamedTuple):
    """A tree of parameters as two, each with None where the other has an array."""

    trained: Any  # have a gradient; of layers [layers, ...], or those of one layer
    frozen: Any = None  # None if there are none

    @staticmethod
    def of(tree: Tree, trained: Tree) -> "LayerParams":
        """A tree, by a tree of whether each leaf is trained."""
        return LayerParams(
            jax.tree.map(lambda x, t: x if t else None, tree, trained),
            jax.tree.map(lambda x, t: None if t else x, tree, trained),
        )

    @property
    def tree(self) -> Any:
        """The inverse of ``of``."""
        if self.frozen is None:
            return self.trained
        return jax.tree.map(lambda x, y: y if x is None else x, *self, is_leaf=lambda x: x is None)


class Scope(NamedTuple):
    microbatch: Any  # the tree of its arrays
    key: Any  # of the micro-batch, or of one layer; None without random numbers
    first_layer: Any  # the number of the stage's first layer in the model
    num_layers: Any  # of the stage; more layers in its arrays are padding


# (carry, the layer's slice of what is scanned, scope of the layer) -> (carry, results)
LayerFn = Callable[[Any, Any, Scope], tuple[Any, Any]]


@dataclasses.dataclass
class Stage:
    """Loops over the layers of a virtual stage."""

    layer: Callable[[LayerParams, Any, Any, Any], Any]  # (params, x, microbatch, key) -> x
    num_layers: int  # in the arrays of a stage
    uneven: bool  # whether some of them are padding on some stages
    # Known from the trace of a forward pass, and read by that of a backward pass.
    _vjp: Any = None  # the tree of jax.vjp's function, and where each of its leaves is from
    _weight_part: Any = None  # of a layer's split backward pass

    def forward(self, params: LayerParams, x: Array, scope: Scope) -> Any:
        def run(x: Array, layer_params: LayerParams, scope: Scope) -> tuple[Any, None]:
            return self.layer(layer_params, x, scope.microbatch, scope.key), None

        return self._scan(run, x, params, scope)[0]

    def forward_storing(self, params: LayerParams, x: Array, scope: Scope) -> tuple[Any, Arrays]:
        return self._scan(self._run_storing, x, params, scope)

    def backward(
        self, params: LayerParams, residuals: Arrays, cotangent: Tree, scope: Scope
    ) -> tuple[Any, Any]:
        def run(cotangent: Tree, indexed: Any, scope: Scope) -> tuple[Any, Any]:
            layer_params, stored = indexed
            grads, cotangent = self._layer_vjp(layer_params, stored, scope)(cotangent)
            return cotangent, grads

        return self._scan(run, cotangent, (params, residuals), scope, reverse=True)

    def backward_input(
        self, params: LayerParams, residuals: Arrays, cotangent: Tree, scope: Scope
    ) -> tuple[Any, Arrays]:
        """The cotangent of the input, and what the gradients of the layers need beside it."""

        def run(cotangent: Tree, indexed: Any, scope: Scope) -> tuple[Any, Arrays]:
            args = (*indexed, cotangent, scope)  # parameters and residuals of the layer
            input_part, self._weight_part = split_backward(self._layer_vjp, *args)
            return input_part(*args)

        return self._scan(run, cotangent, (params, residuals), scope, reverse=True)

    def backward_weight(self, params: LayerParams, crossing: Arrays, scope: Scope) -> Any:
        def run(_: None, indexed: Any, scope: Scope) -> tuple[None, Any]:
            return None, self._weight_part(*indexed, scope)

        return self._scan(run, None, (params, crossing), scope)[1]

    def stores_changed_params(self, params: LayerParams, x: Array, scope: Scope) -> bool:
        """Whether a layer's residuals hold what it made of its parameters alone, such as a cast."""
        own = jax.tree.map(lambda x: x[0], params)
        scope = _of_layer(scope, 0)
        leaves, treedef = jax.tree.flatten((own, x, scope.microbatch, scope.key))

        def residuals(inputs: Arrays) -> Arrays:
            own, x, microbatch, key = treedef.unflatten(inputs)
            return self._run_storing(x, own, scope._replace(microbatch=microbatch, key=key))[1]

        graph = Graph(residuals, leaves, [False] * len(leaves))
        num_params = len(jax.tree.leaves(own))
        reads = (graph.needed([value], graph.constants)[1] for value in graph.outputs)
        return any(read and max(read) < num_params for read in reads)

    def _scan(
        self, run: LayerFn, carry: Any, by_layer: Any, scope: Scope, *, reverse: bool = False
    ) -> tuple[Any, Any]:
        """Runs every layer; padding leaves the carry as it is, and gives zeros."""

        def body(carry: Any, indexed: Any) -> tuple[Any, Any]:
            of_layer, i = indexed
            layer_scope = _of_layer(scope, i)
            if not self.uneven:
                return run(carry, of_layer, layer_scope)
            _, types = jax.eval_shape(run, carry, of_layer, layer_scope)
            skip = functools.partial(_skip, types)
            return lax.cond(i < scope.num_layers, run, skip, carry, of_layer, layer_scope)

        indexed = (by_layer, jnp.arange(self.num_layers))
        return lax.scan(body, carry, indexed, reverse=reverse)

    def _run_storing(self, x: Array, params: LayerParams, scope: Scope) -> tuple[Any, Arrays]:
        def of_inputs(trained: Tree, x: Array) -> Any:
            own = params._replace(trained=trained)
            return self.layer(own, x, scope.microbatch, scope.key)

        y, vjp = jax.vjp(of_inputs, params.trained, x)
        # Residuals are what jax.vjp stores, without parameters and micro-batch, which are there.
        leaves, treedef = jax.tree.flatten(vjp)
        known = [id(array) for array in _known(params, scope)]
        sources = [known.index(id(leaf)) if id(leaf) in known else None for leaf in leaves]
        self._vjp = treedef, sources
        return y, [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]

    def _layer_vjp(self, params: LayerParams, stored: Arrays, scope: Scope) -> Callable[..., Any]:
        """``vjp(cotangent) -> (gradients of trained parameters, cotangent of the input)``."""
        treedef, sources = self._vjp
        known = _known(params, scope)
        residuals = iter(stored)
        return treedef.unflatten([next(residuals) if s is None else known[s] for s in sources])


def _skip(types: Any, carry: Any, *_: Any) -> tuple[Any, Any]:
    return carry, jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), types)


def split_backward(
    layer_vjp: Callable[..., Any],
    params: LayerParams,
    stored: Arrays,
    cotangent: Tree,
    scope: Scope,
) -> tuple[Callable[..., tuple[Any, Arrays]], Callable[..., Any]]:
    """The backward pass of one layer in two: the gradient of its input, then of its parameters."""
    # What the second needs of the first crosses over: results of the first that it reads,
    # residuals, and the cotangent. Operations that give both at once, such as loops and recomputed
    # regions, are in the first, and their gradients of parameters cross.
    known = _known(params, scope)
    num_trained = len(jax.tree.leaves(params.trained))
    leaves, treedef = jax.tree.flatten(cotangent)
    known_treedef = jax.tree.structure((params, scope.microbatch, scope.key))
    trained_treedef = jax.tree.structure(params.trained)

    def backward(inputs: Arrays) -> Arrays:
        given = inputs[: len(known)]
        others = inputs[len(known) :]
        here, microbatch, key = known_treedef.unflatten(given)
        there = scope._replace(microbatch=microbatch, key=key)
        vjp = layer_vjp(here, others[: len(stored)], there)
        return jax.tree.leaves(vjp(treedef.unflatten(others[len(stored) :])))

    # Values of the graph are numbers, of which the first are those of its inputs.
    inputs = [*known, *stored, *leaves]
    graph = Graph(backward, inputs, [False] * len(inputs))
    of_params = graph.outputs[:num_trained]
    of_input = graph.outputs[num_trained:]
    first, _ = graph.needed(of_input, graph.constants)
    computed = {result for eqn in first for result in eqn.results}
    second, _ = graph.needed(of_params, computed | graph.constants.keys())
    reads = {x for eqn in second for x in eqn.operands} | set(of_params)
    crossing = sorted(reads & (computed | set(range(len(known), len(inputs)))))

    def input_part(params: LayerParams, stored: Arrays, cotangent: Tree, scope: Scope) -> Any:
        inputs = [*_known(params, scope), *stored, *jax.tree.leaves(cotangent)]
        values = dict(enumerate(inputs)) | graph.constants
        evaluate(graph.needed(of_input, graph.constants)[0], values)
        return treedef.unflatten([values[x] for x in of_input]), [values[x] for x in crossing]

    def weight_part(params: LayerParams, stored: Arrays, scope: Scope) -> Any:
        values = dict(enumerate(_known(params, scope))) | graph.constants
        values |= zip(crossing, stored, strict=True)
        evaluate(graph.needed(of_params, values)[0], values)
        return trained_treedef.unflatten([values[x] for x in of_params])

    return input_part, weight_part


def _known(params: LayerParams, scope: Scope) -> Arrays:
    """Arrays that a backward pass has without storing them."""
    return jax.tree.leaves((params, scope.microbatch, scope.key))


def _of_layer(scope: Scope, i: Any) -> Scope:
    key = scope.key
    return scope._replace(
        key=key if key is None else jax.random.fold_in(key, scope.first_layer + i)
    )
