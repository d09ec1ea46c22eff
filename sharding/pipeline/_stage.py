"""The layers of one virtual stage: their forward pass, and the backward pass, whole or split."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.execution_order import Graph, evaluate

Arrays = list[Any]


class LayerParams(NamedTuple):
    """Parameters of layers: leaves of a tree, [layers, ...] or those of one layer.

    Attributes:
      trained: the leaves that have a gradient.
      frozen: the others.
    """

    trained: Arrays
    frozen: Arrays


class Scope(NamedTuple):
    """What else a layer reads.

    Attributes:
      microbatch: the tree of its arrays.
      key: of the micro-batch, or of one layer; None without random numbers.
      first_layer: the number of the stage's first layer in the model.
      num_layers: of the stage; more layers in its arrays are padding.
    """

    microbatch: Any
    key: Any
    first_layer: Any
    num_layers: Any


@dataclasses.dataclass
class Stage:
    """Loops over the layers of a virtual stage.

    Residuals are what ``jax.vjp`` of one layer stores for its backward pass, without parameters and
    arrays of the micro-batch, which are there anyway. A backward pass is split at one layer: the
    equations that the gradient of its input depends on, and the others.

    Attributes:
      layer: ``layer(LayerParams, x, microbatch, key) -> x``.
      num_layers: in the arrays of a stage.
      uneven: whether some of them are padding on some stages.
    """

    layer: Callable[[LayerParams, Any, Any, Any], Any]
    num_layers: int
    uneven: bool
    _vjp: Any = None  # the tree of jax.vjp's function, and where each of its leaves is from
    _split: Any = None

    def forward(self, params: LayerParams, x: Any, scope: Scope) -> Any:
        """The activations after the layers."""

        def body(x: Any, indexed: tuple[LayerParams, Any]) -> tuple[Any, None]:
            layer_params, i = indexed
            args = (layer_params, x, _of_layer(scope, i))
            return self._if_layer(i, scope, self._run, _first, *args), None

        return lax.scan(body, x, (params, jnp.arange(self.num_layers)))[0]

    def forward_storing(self, params: LayerParams, x: Any, scope: Scope) -> tuple[Any, Arrays]:
        """The activations, and the residuals of every layer."""

        def body(x: Any, indexed: tuple[LayerParams, Any]) -> tuple[Any, Arrays]:
            layer_params, i = indexed
            args = (layer_params, x, _of_layer(scope, i))
            like = jax.eval_shape(self._run_storing, *args)[1] if self.uneven else []
            other = functools.partial(_first_and_zeros, like)
            return self._if_layer(i, scope, self._run_storing, other, *args)

        return lax.scan(body, x, (params, jnp.arange(self.num_layers)))

    def backward(
        self, params: LayerParams, residuals: Arrays, cotangent: Any, scope: Scope
    ) -> tuple[Any, Arrays]:
        """The cotangent of the input, and the gradients of the layers."""

        def body(cotangent: Any, indexed: Any) -> tuple[Any, Arrays]:
            layer_params, stored, i = indexed

            def run(cotangent: Any) -> tuple[Any, Arrays]:
                vjp = self._layer_vjp(layer_params, stored, _of_layer(scope, i))
                grads, cotangent = vjp(cotangent)
                return cotangent, grads

            def skip(cotangent: Any) -> tuple[Any, Arrays]:
                return cotangent, [jnp.zeros_like(x) for x in layer_params.trained]

            return self._if_layer(i, scope, run, skip, cotangent)

        indexed = (params, residuals, jnp.arange(self.num_layers))
        return lax.scan(body, cotangent, indexed, reverse=True)

    def backward_input(
        self, params: LayerParams, residuals: Arrays, cotangent: Any, scope: Scope
    ) -> tuple[Any, Arrays]:
        """The cotangent of the input, and what the gradients of the layers need beside it."""

        def body(cotangent: Any, indexed: Any) -> tuple[Any, Arrays]:
            layer_params, stored, i = indexed
            args = (layer_params, stored, cotangent, _of_layer(scope, i))
            split = self._split = SplitBackward.of(self._layer_vjp, *args)
            like = jax.eval_shape(split.input_part, *args)[1] if self.uneven else []

            def other(params: Any, stored: Any, cotangent: Any, scope: Any) -> tuple[Any, Arrays]:
                del params, stored, scope
                return _first_and_zeros(like, None, cotangent)

            return self._if_layer(i, scope, split.input_part, other, *args)

        indexed = (params, residuals, jnp.arange(self.num_layers))
        return lax.scan(body, cotangent, indexed, reverse=True)

    def backward_weight(self, params: LayerParams, crossing: Arrays, scope: Scope) -> Arrays:
        """The gradients of the layers, after ``backward_input``."""

        def body(_: None, indexed: Any) -> tuple[None, Arrays]:
            layer_params, stored, i = indexed

            def run(stored: Arrays) -> Arrays:
                return self._split.weight_part(layer_params, stored, _of_layer(scope, i))

            def skip(stored: Arrays) -> Arrays:
                del stored
                return [jnp.zeros_like(x) for x in layer_params.trained]

            return None, self._if_layer(i, scope, run, skip, stored)

        return lax.scan(body, None, (params, crossing, jnp.arange(self.num_layers)))[1]

    def stores_changed_params(self, params: LayerParams, x: Any, scope: Scope) -> bool:
        """Whether a layer's residuals hold what it made of its parameters alone, such as a cast."""
        treedef: Any
        own = LayerParams(*([leaf[0] for leaf in part] for part in params))
        scope = _of_layer(scope, 0)
        leaves, treedef = jax.tree.flatten((own, x, scope.microbatch, scope.key))

        def residuals(inputs: Arrays) -> Arrays:
            own, x, microbatch, key = treedef.unflatten(inputs)
            return self._run_storing(own, x, scope._replace(microbatch=microbatch, key=key))[1]

        graph = Graph(residuals, leaves, [False] * len(leaves))
        num_params = len(own.trained) + len(own.frozen)
        for value in graph.outputs:
            _, read = graph.needed([value], graph.constants)
            if read and max(read) < num_params:
                return True
        return False

    # --- One layer --------------------------------------------------------------------------------

    def _if_layer(
        self, i: Any, scope: Scope, run: Callable[..., Any], skip: Callable[..., Any], *args: Any
    ) -> Any:
        """``run(*args)`` for a layer, ``skip(*args)`` for padding."""
        return lax.cond(i < scope.num_layers, run, skip, *args) if self.uneven else run(*args)

    def _run(self, params: LayerParams, x: Any, scope: Scope) -> Any:
        return self.layer(params, x, scope.microbatch, scope.key)

    def _run_storing(self, params: LayerParams, x: Any, scope: Scope) -> tuple[Any, Arrays]:
        def of_inputs(trained: Arrays, x: Any) -> Any:
            return self._run(params._replace(trained=trained), x, scope)

        y, vjp = jax.vjp(of_inputs, params.trained, x)
        leaves, treedef = jax.tree.flatten(vjp)
        known = [id(array) for array in _known(params, scope)]
        sources = [known.index(id(leaf)) if id(leaf) in known else None for leaf in leaves]
        self._vjp = treedef, sources
        return y, [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]

    def _layer_vjp(self, params: LayerParams, stored: Arrays, scope: Scope) -> Callable[..., Any]:
        treedef, sources = self._vjp
        known, residuals = _known(params, scope), iter(stored)
        return treedef.unflatten([next(residuals) if s is None else known[s] for s in sources])


@dataclasses.dataclass(frozen=True)
class SplitBackward:
    """The backward pass of one layer in two: the gradient of its input, then of its parameters.

    What the second needs of the first crosses over: results of the first that it reads, residuals,
    and the cotangent. Operations that give both at once, such as loops and recomputed regions, are
    in the first, and their gradients of parameters cross.
    """

    graph: Graph
    num_trained: int
    crossing: tuple[int, ...]
    treedef: Any  # of the cotangent

    @staticmethod
    def of(
        layer_vjp: Callable[..., Any],
        params: LayerParams,
        stored: Arrays,
        cotangent: Any,
        scope: Scope,
    ) -> "SplitBackward":
        """Traces the backward pass of a layer."""
        known = _known(params, scope)
        num_trained, num_params = len(params.trained), len(params.trained) + len(params.frozen)
        treedef: Any
        of_scope: Any
        leaves, treedef = jax.tree.flatten(cotangent)
        of_scope = jax.tree.structure((scope.microbatch, scope.key))

        def backward(inputs: Arrays) -> Arrays:
            given, rest = inputs[: len(known)], inputs[len(known) :]
            here = LayerParams(given[:num_trained], given[num_trained:num_params])
            microbatch, key = of_scope.unflatten(given[num_params:])
            there = scope._replace(microbatch=microbatch, key=key)
            vjp = layer_vjp(here, rest[: len(stored)], there)
            grads, cotangent = vjp(treedef.unflatten(rest[len(stored) :]))
            return [*grads, *jax.tree.leaves(cotangent)]

        inputs = [*known, *stored, *leaves]
        graph = Graph(backward, inputs, [False] * len(inputs))
        first, _ = graph.needed(graph.outputs[num_trained:], graph.constants)
        there = {result for eqn in first for result in eqn.results}
        second, _ = graph.needed(graph.outputs[:num_trained], there | graph.constants.keys())
        reads = {x for eqn in second for x in eqn.operands} | set(graph.outputs[:num_trained])
        crossing = there | set(range(len(known), len(inputs)))
        return SplitBackward(graph, num_trained, tuple(sorted(reads & crossing)), treedef)

    def input_part(
        self, params: LayerParams, stored: Arrays, cotangent: Any, scope: Scope
    ) -> tuple[Any, Arrays]:
        """The cotangent of the input, and what crosses to ``weight_part``."""
        graph, outputs = self.graph, self.graph.outputs[self.num_trained :]
        inputs = [*_known(params, scope), *stored, *jax.tree.leaves(cotangent)]
        values = dict(enumerate(inputs)) | graph.constants
        evaluate(graph.needed(outputs, graph.constants)[0], values)
        found = self.treedef.unflatten([values[x] for x in outputs])
        return found, [values[x] for x in self.crossing]

    def weight_part(self, params: LayerParams, crossing: Arrays, scope: Scope) -> Arrays:
        """The gradients of the trained parameters."""
        graph, outputs = self.graph, self.graph.outputs[: self.num_trained]
        values = dict(enumerate(_known(params, scope))) | graph.constants
        values |= zip(self.crossing, crossing, strict=True)
        evaluate(graph.needed(outputs, values)[0], values)
        return [values[x] for x in outputs]


def _known(params: LayerParams, scope: Scope) -> Arrays:
    """Arrays that a backward pass has without storing them."""
    return [*params.trained, *params.frozen, *jax.tree.leaves((scope.microbatch, scope.key))]


def _of_layer(scope: Scope, i: Any) -> Scope:
    """With the key of the stage's i-th layer."""
    if scope.key is None:
        return scope
    return scope._replace(key=jax.random.fold_in(scope.key, scope.first_layer + i))


def _first(params: LayerParams, x: Any, scope: Scope) -> Any:
    del params, scope
    return x


def _first_and_zeros(like: Sequence[Any], params: Any, x: Any, *rest: Any) -> tuple[Any, Arrays]:
    del params, rest
    return x, [jnp.zeros(t.shape, t.dtype) for t in like]
