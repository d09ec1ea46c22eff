"""The loss of one device, traced once and evaluated by rules of its parameters."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from optax_ext.equations import trace
from sharding._types import Tree
from sharding.loss._diverging import collective_in, diverging
from sharding.loss._evaluate import EquationRule, Evaluator, Fetch, Param
from sharding.loss._marks import CALL, marking
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import NamedAxes
from sharding.placement._specs import is_spec

# Operations on one array, and perhaps indices, whose results are parts of it.
PARTS = {"dynamic_slice", "slice", "split"}


class DeviceLoss:
    """The traced loss of one device, of its shard of the batch; it may name the user's axes."""

    def __init__(
        self, layout: Layout, fn: Callable[..., Any], params: Tree, specs: Tree, args: Any
    ):
        """Traces ``fn(params, *args)`` of types; ``specs`` are those of ``params`` between steps.

        Raises:
          ValueError: if devices could wait for each other in a collective of the loss.
        """
        self.layout, self._axes = layout, NamedAxes(sorted(layout.other_axes), ("AxisType.Auto.",))
        self.types, treedef = jax.tree.flatten(params)
        self.specs = [layout.other_spec(s) for s in jax.tree.leaves(specs, is_leaf=is_spec)]
        # Of each parameter, the dims that other axes shard, counted from the end.
        self.named_dims = [
            [d - x.ndim for d, entry in enumerate(spec) if entry]
            for x, spec in zip(self.types, self.specs, strict=True)
        ]

        def run(leaves: list[Any], args: Any) -> None:
            self.closed, results = trace(fn, treedef.unflatten(leaves), *args)
            self._results = jax.tree.structure(results)

        with marking(per_device=True):
            self._axes.run(run, (self.specs, PartitionSpec()), self.types, args, of_types=True)
        # What no output needs uses no parameter.
        every = [True] * len(self.closed.jaxpr.outvars)
        live = partial_eval.dce_jaxpr(self.closed.jaxpr, every, instantiate=True)[0]
        self.closed = ClosedJaxpr(live, self.closed.consts)
        varies = [i >= len(self.types) for i in range(len(live.invars))]
        self.apart = diverging(live, varies, layout.data_axes)
        if collective := collective_in(live, self.apart):
            raise ValueError(
                f"the loss has a collective ({collective}, such as that of a BatchNorm with the "
                "statistics of all devices) in a branch or a loop that devices take by their own "
                "data: devices would exchange what does not belong together. Move it out of the "
                "branch (docs: understand/meaning)."
            )

    def evaluate(
        self,
        param: Callable[[int, jax.Array, jax.Array], Param | jax.Array],
        held: list[Any],
        taps: list[Any],
        args: Any,
        call: EquationRule,
    ) -> tuple[Any, list[Fetch]]:
        """What it returns for ``param(number, held, tap)`` of each; where it fetches them.

        ``call`` is the rule of ``with_handles``.
        """
        evaluator = Evaluator(self.layout.recomputes, equations={CALL: call})

        def run(held: list[Any], taps: list[Any], args: Any) -> list[Any]:
            params = map(param, range(len(held)), held, taps)
            return evaluator(self.closed, [*params, *jax.tree.leaves(args)])

        leaves = self._axes.run(run, (self.specs, self.specs, PartitionSpec()), held, taps, args)
        return jax.tree.unflatten(self._results, leaves), evaluator.fetches

    def is_early(self, fetch: Fetch) -> bool:
        """Whether more is fetched than is used: before a branch, or by an index of this device."""
        eqn = fetch.eqn
        by_device = id(eqn) in self.apart and eqn.primitive.name in PARTS
        return by_device or fetch.encloses_mark
