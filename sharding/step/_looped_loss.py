"""Loops over stacked parameters in a traced loss: found, and run so that layers take gradients.

A layer of such a loop reads its parameters by its index, and hands their gradients to a function as
the loop runs backward. What is outside of the loops stays as it is.
"""

import functools
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext.traced_graph import bind_equation
from sharding._types import Tree
from sharding.step._layer_hooks import (
    CALLS,
    Hook,
    HookedLoss,
    HookedParam,
    held_array,
    scan_sizes,
    taps_of,
    with_held,
)


class Layers(NamedTuple):
    """What the layers of a loop do.

    Attributes:
      refs: the first argument of all three: what they read and write.
      read: ``read(refs, layer)``, the parameters of a layer, by their numbers.
      taps: ``taps(params)``, what is differentiated in their place.
      update: ``update(refs, layer, grads)``, what is done with the gradients of a layer.
    """

    refs: Tree
    read: Callable[[Tree, jax.Array], dict[int, jax.Array]]
    taps: Callable[[dict[int, jax.Array]], dict[int, jax.Array]]
    update: Callable[[Tree, jax.Array, dict[int, jax.Array]], None]


class _Loops(HookedLoss):
    """A traced loss; of some parameters, cast or not, loops that slice them are special."""

    sliced: Container[int]  # the numbers of these parameters

    def _results(self, eqn: Any, operands: list[Any], in_loop: bool) -> list[Any]:
        name = eqn.primitive.name
        if name == "convert_element_type" and self._is_sliced(operands[0]):
            return [operands[0]._replace(moves=(*operands[0].moves, eqn))]
        if name not in (*CALLS, "scan"):
            operands = list(map(self._unsliced, operands))
        return super()._results(eqn, operands, in_loop)

    def _scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        own = set(range(sum(scan_sizes(eqn.params)), len(operands)) if eqn.params["length"] else ())
        own = {k for k in own if self._is_sliced(operands[k]) and _is_only_cast(operands[k])}
        operands = [x if k in own else self._unsliced(x) for k, x in enumerate(operands)]
        return self._loop(eqn, operands, own)

    def _loop(self, eqn: Any, operands: list[Any], own: set[int]) -> list[Any]:
        """The results of a scan, some of whose operands are to be sliced."""
        raise NotImplementedError

    def _is_sliced(self, x: Any) -> bool:
        return isinstance(x, HookedParam) and x.number in self.sliced

    def _unsliced(self, x: Any) -> Any:
        return self._full(x) if self._is_sliced(x) else x


class _Finder(_Loops):
    """Finds them, and which parameters are used in another way."""

    def __init__(self, closed: Any, sliced: Container[int]):
        self.sliced = sliced
        self.loops: list[list[int]] = []
        self.used: set[int] = set()

        def fetch(number: int, held: jax.Array) -> jax.Array:
            self.used.add(number)
            return held

        super().__init__(closed, Hook(fetch, lambda number, full, tap: full), "", False)

    def _loop(self, eqn: Any, operands: list[Any], own: set[int]) -> list[Any]:
        if own:
            self.loops.append([operands[k].number for k in sorted(own)])
        full = [x.moved(x.held) if k in own else self._full(x) for k, x in enumerate(operands)]
        return list(bind_equation(eqn, full))


def find_loops(
    closed: Any, leaves: list[Any], trained: list[bool], args: list[Any]
) -> list[list[int]]:
    """The trained parameters that a loop of a loss slices, and nothing else uses; loop by loop."""
    finder = _Finder(closed, {i for i, t in enumerate(trained) if t})
    jax.eval_shape(lambda leaves, args: finder(leaves, leaves, *args), leaves, args)
    every = [i for loop in finder.loops for i in loop]
    finder.used |= {i for i in every if every.count(i) > 1}
    return [own for loop in finder.loops if (own := [i for i in loop if i not in finder.used])]


class LoopedLoss(_Loops):
    """A traced loss whose layers, in some loops, are updated as these loops run backward."""

    def __init__(self, closed: Any, layers: dict[int, Layers], token: jax.Array, *hooks: Any):
        """Of a trace.

        Args:
          closed: the trace.
          layers: for each parameter that a loop slices, the layers of the loop.
          token: what is differentiated, so that layers run backward.
          *hooks: of a ``HookedLoss``.
        """
        super().__init__(closed, *hooks)
        self.sliced, self.layers, self.token = layers, layers, token
        self._cast: dict[int, Callable[[jax.Array], jax.Array]] = {}

    def _loop(self, eqn: Any, operands: list[Any], own: set[int]) -> list[Any]:
        index = jnp.arange(eqn.params["length"])  # held in the place of a stack
        self._cast |= {operands[k].number: operands[k].moved for k in own}
        indices = {k: operands[k]._replace(held=index, tap=index, moves=()) for k in own}
        return HookedLoss._scan(self, eqn, [indices.get(k, x) for k, x in enumerate(operands)])

    def _body(self, body: Any, args: list[Any]) -> list[Any]:
        own = {k: x.number for k, x in enumerate(args) if self._is_sliced(x)}
        if not own:
            return super()._body(body, args)
        layers, i = self.layers[args[min(own)].number], args[min(own)].held
        rest = [x for k, x in enumerate(args) if k not in own]

        def layer(params: dict[int, jax.Array], taps: dict[int, jax.Array], more: Any) -> list[Any]:
            others = iter(with_held(rest, *more))
            every = [
                HookedParam(own[k], self._cast[own[k]](params[own[k]]), taps[own[k]], [])
                if k in own
                else next(others)
                for k in range(len(args))
            ]
            return list(map(self._full, self._run(body.jaxpr, body.consts, every)))

        @jax.custom_vjp
        def call(refs: Tree, i: jax.Array, token: jax.Array, more: Any) -> list[Any]:
            del token
            params = layers.read(refs, i)
            return layer(params, layers.taps(params), more)

        def backward(residuals: Any, cotangents: list[Any]) -> tuple[Any, ...]:
            refs, i, more = residuals
            params = layers.read(refs, i)
            run = functools.partial(layer, params)
            _, vjp = jax.vjp(run, layers.taps(params), more)
            grads, more = vjp(cotangents)
            layers.update(refs, i, grads)
            return None, None, jnp.zeros(()), more

        call.defvjp(
            lambda refs, i, token, more: (call(refs, i, token, more), (refs, i, more)), backward
        )
        return call(layers.refs, i, self.token, (list(map(held_array, rest)), taps_of(rest)))


def _is_only_cast(param: HookedParam) -> bool:
    return all(eqn.primitive.name == "convert_element_type" for eqn in param.moves)


def in_order(xs: dict[int, Any]) -> list[Any]:
    return [xs[k] for k in sorted(xs)]
