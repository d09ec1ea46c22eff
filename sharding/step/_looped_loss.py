"""Loops over stacked parameters in a traced loss: found, and run so that layers take gradients.

A layer of such a loop reads its parameters by its index, and hands their gradients to a function as
the loop runs backward. What is outside of the loops stays as it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from optax_ext.traced_graph import bind_equation
from sharding._types import Tree
from sharding.offload._streamed_layers import run_streamed
from sharding.step._layer_hooks import CALLS, Hook, HookedLoss, HookedParam, scan_sizes

# From a scan's equation, constants, carry, stacked parameters and other xs (by position): results.
RunLoop = Callable[[Any, list[Any], list[Any], dict[int, HookedParam], dict[int, Any]], list[Any]]


class LoopedLoss(HookedLoss):
    """A traced loss whose loops over stacked parameters, cast or not, are run by a function."""

    def __init__(self, closed: Any, run_loop: RunLoop, used: Callable[[int], Any]):
        """``used`` is called with each parameter that is used in another way."""

        def fetch(number: int, held: jax.Array) -> jax.Array:
            used(number)
            return held

        super().__init__(closed, Hook(fetch, lambda number, full, tap: full), "", False)
        self.run_loop = run_loop

    def run(self, args: list[Any]) -> list[Any]:
        """What the loss returns of its arguments, the parameters that loops may slice as such."""
        return list(map(self._full, self._run(self.closed.jaxpr, self.closed.consts, args)))

    def _results(self, eqn: Any, operands: list[Any], in_loop: bool) -> list[Any]:
        name = eqn.primitive.name
        if name == "convert_element_type" and isinstance(operands[0], HookedParam):
            return [operands[0]._replace(moves=(*operands[0].moves, eqn))]
        if name not in (*CALLS, "scan"):
            operands = list(map(self._full, operands))
        return super()._results(eqn, operands, in_loop)

    def _scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        num_consts, num_carry = scan_sizes(eqn.params)
        before = list(map(self._full, operands[: num_consts + num_carry]))
        xs = dict(enumerate(operands[num_consts + num_carry :]))
        own = {k: x for k, x in xs.items() if isinstance(x, HookedParam) and _is_only_cast(x)}
        own = own if eqn.params["length"] else {}
        others = {k: self._full(x) for k, x in xs.items() if k not in own}
        return self.run_loop(eqn, before[:num_consts], before[num_consts:], own, others)


def sliceable(number: int, x: Any) -> HookedParam:
    """A parameter that loops may slice, as an argument of a ``LoopedLoss``."""
    return HookedParam(number, x, x, [])


def find_loops(
    closed: Any, leaves: list[Any], trained: list[bool], args: list[Any]
) -> list[list[int]]:
    """The trained parameters that a loop of a loss slices, and nothing else uses; loop by loop."""
    loops: list[list[int]] = []
    used: set[int] = set()

    def run_loop(eqn: Any, consts: Any, carry: Any, own: Any, others: Any) -> list[Any]:
        loops.append([x.number for x in own.values()])
        full = {k: x.moved(x.held) for k, x in own.items()}
        return list(bind_equation(eqn, [*consts, *carry, *in_order(full | others)]))

    def run(leaves: list[Any], args: list[Any]) -> list[Any]:
        params = [
            sliceable(i, x) if t else x
            for i, (x, t) in enumerate(zip(leaves, trained, strict=True))
        ]
        return LoopedLoss(closed, run_loop, used.add).run([*params, *args])

    jax.eval_shape(run, leaves, args)
    every = [i for loop in loops for i in loop]
    used |= {i for i in every if every.count(i) > 1}
    return [own for loop in loops if (own := [i for i in loop if i not in used])]


def _is_only_cast(param: HookedParam) -> bool:
    return all(eqn.primitive.name == "convert_element_type" for eqn in param.moves)


def in_order(xs: dict[int, Any]) -> list[Any]:
    return [xs[k] for k in sorted(xs)]


def run_loop(
    eqn: Any,
    args: tuple[list[Any], list[Any], dict[int, HookedParam], dict[int, Any]],
    read: Callable[[Tree, jax.Array], list[jax.Array]],
    update: Callable[[Tree, jax.Array, list[jax.Array]], None],
    refs: Tree,
    token: jax.Array,
    streamed: bool,
) -> list[Any]:
    """The results of a loop over stacked parameters, whose layers are updated as it runs backward.

    Args:
      eqn: of the loop.
      args: as a ``RunLoop`` gets them.
      read: the parameters of a layer.
      update: what is done with the gradients of a layer.
      refs: the arguments of both.
      token: what is differentiated, so that layers run backward.
      streamed: whether ``refs`` are cells, of stacks in host memory.
    """
    consts, carry, own, others = args
    options = {key: eqn.params[key] for key in ("reverse", "unroll")}
    body = jaxpr_as_fun(eqn.params["jaxpr"])

    def layer(params: list[Any], consts: list[Any], carry: list[Any], rest: list[Any]) -> list[Any]:
        cast = [x.moved(w) for x, w in zip(own.values(), params, strict=True)]
        xs = dict(zip(own, cast, strict=True)) | dict(zip(others, rest, strict=True))
        return list(body(*consts, *carry, *in_order(xs)))

    if streamed:
        given, length = (consts, carry, list(others.values())), eqn.params["length"]
        return run_streamed(layer, read, update, refs, token, given, length, **options)

    @jax.custom_vjp
    def call(refs: Tree, i: jax.Array, token: jax.Array, *args: list[Any]) -> list[Any]:
        del token
        return layer(read(refs, i), *args)

    def backward(residuals: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        refs, i, args = residuals
        _, vjp = jax.vjp(layer, read(refs, i), *args)
        grads, *more = vjp(cotangents)
        update(refs, i, grads)
        return (None, None, jnp.zeros(()), *more)

    call.defvjp(
        lambda refs, i, token, *args: (call(refs, i, token, *args), (refs, i, args)), backward
    )

    def step(carry: list[Any], x: Any) -> tuple[list[Any], list[Any]]:
        i, rest = x
        out = call(refs, i, token, consts, carry, rest)
        return out[: len(carry)], out[len(carry) :]

    xs = jnp.arange(eqn.params["length"]), list(others.values())
    carry, outs = lax.scan(step, carry, xs, **options)
    return [*carry, *outs]
