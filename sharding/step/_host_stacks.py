"""A traced loss of parameters some of which are stacks in host memory, as are their gradients.

A loop over the layers of a stack loads each where it uses it, in both passes. Any other use loads
the full array.
"""

from typing import Any

import jax

from optax_ext.equations import Call, Remat, Scan, record_of
from sharding.offload._host_memory import DEVICE, on_host
from sharding.step._layer_hooks import HookedLoss, HookedParam, is_cast


class StreamedLoss(HookedLoss):
    """A ``HookedLoss`` whose hook may get an array in host memory; nothing computes there."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.by_layer: set[int] = set()  # the parameters whose gradients are stored layer by layer

    def streamed(self, number: int, tap: jax.Array) -> jax.Array:
        """The tap of a parameter: in host memory where one loop alone reads it, layer by layer.

        Sums of the gradients of several uses are computed on the device, too.
        """
        if not on_host(tap):
            return tap
        if _is_read_by_one_loop(self.closed.jaxpr, self.closed.jaxpr.invars[number]):
            self.by_layer.add(number)
            return tap
        return jax.device_put(tap, DEVICE)

    def _run(self, jaxpr: Any, consts: Any, args: Any, in_loop: bool = False) -> list[Any]:
        if in_loop:
            args = list(map(self._of_layer, args))
        return super()._run(jaxpr, consts, args, in_loop)

    def _of_layer(self, x: Any) -> Any:
        """A parameter of a layer, all of whose uses give one gradient."""
        if not (_is_param(x) and x.number in self.by_layer and on_host(x.tap)):
            return x
        return x._replace(tap=jax.device_put(x.tap, DEVICE))

    def _results(self, eqn: Any, operands: list[Any], in_loop: bool) -> list[Any]:
        first: Any = operands[0] if operands else None
        if is_cast(eqn) and _is_param(first) and on_host(first.held):
            return [first._replace(moves=(*first.moves, eqn))]
        return super()._results(eqn, operands, in_loop)

    def _to_slice(self, param: HookedParam) -> Any:
        casts = all(map(is_cast, param.moves))
        return param if casts and on_host(param.held) else super()._to_slice(param)


def _is_param(x: Any) -> bool:
    return isinstance(x, HookedParam)


def _is_read_by_one_loop(jaxpr: Any, var: Any) -> bool:
    """Whether a scan slices an array, cast or not, and nothing else uses it."""
    uses = [(eqn, k) for eqn in jaxpr.eqns for k, x in enumerate(eqn.invars) if x is var]
    if len(uses) != 1 or any(x is var for x in jaxpr.outvars):
        return False
    ((eqn, k),) = uses
    if is_cast(eqn):
        return _is_read_by_one_loop(jaxpr, eqn.outvars[0])
    record = record_of(eqn)
    if isinstance(record, Scan):
        return k >= record.num_consts + record.num_carry
    if isinstance(record, Call | Remat):
        inner = getattr(record.body, "jaxpr", record.body)
        return _is_read_by_one_loop(inner, inner.invars[k])
    return False
