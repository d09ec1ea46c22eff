"""A loss, traced once for one set of types, and evaluated by rules of its parameters."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from optax_ext.equations import trace
from sharding._types import Tree
from sharding.loss._evaluate import Evaluator, Fetch
from sharding.loss._marks import marking


class TracedLoss:
    """A loss of parameters and of other arguments.

    Some mesh axes are Auto in it. If it names one, as ``out_sharding`` and ``reshard`` do, they
    become Explicit: arrays then have the types that they have under ``jit``.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        params: Tree,
        args: tuple[Any, ...],
        axes: tuple[str, ...],
        names_types: Callable[[ValueError], bool],
        specs: tuple[Any, Any],
    ):
        """Traces ``fn(params, *args)`` of types, which on the mesh ``axes`` have ``specs``.

        ``names_types`` says of an error whether the loss named an axis, and it was Auto.
        """
        self._axes, self._names_types, self._is_typed = axes, names_types, False

        def run(params: Tree, args: tuple[Any, ...]) -> None:
            self.closed, results = trace(fn, params, *args)
            self._results = jax.tree.structure(results)

        with marking():
            jax.eval_shape(functools.partial(self._on_axes, run, specs), params, args)

    def _on_axes(self, fn: Callable[..., Any], specs: tuple[Any, ...], *args: Any) -> Any:
        if not self._is_typed:
            try:
                return fn(*args)
            except ValueError as error:
                self._is_typed = bool(self._axes) and self._names_types(error)
                if not self._is_typed:
                    raise
        return jax.sharding.explicit_axes(fn, axes=self._axes, in_sharding=specs)(*args)

    def evaluate(
        self,
        evaluator: Evaluator,
        params: Callable[[Any, Any], list[Any]],
        given: tuple[Any, Any, tuple[Any, ...]],
        specs: tuple[Any, ...],
    ) -> tuple[Any, list[Fetch]]:
        """What the loss returns, and where it fetches parameters.

        ``given`` is what is held, taps and other arguments, with ``specs`` as when it was traced;
        ``params`` makes the loss's parameters, ``Param`` or arrays, of the first two.
        """

        def run(held: Any, taps: Any, args: tuple[Any, ...]) -> list[Any]:
            return evaluator(self.closed, [*params(held, taps), *jax.tree.leaves(args)])

        leaves = self._on_axes(run, specs, *given)
        return jax.tree.unflatten(self._results, leaves), evaluator.fetches
