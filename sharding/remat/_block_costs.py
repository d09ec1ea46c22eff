"""What a block costs by each choice of saved names: traced, and compiled for its temporaries."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from sharding._types import Array, Tree
from sharding.plan.audit._liveness import temporaries_of
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._traced_model import Work, work_of
from sharding.remat._checkpoint import Fn, policy_of
from sharding.remat._choose_saved_names import NamedValues, SavedNames


@dataclasses.dataclass(frozen=True)
class TracedBlock:
    fn: Fn  # ``fn(params, x) -> y``
    params: Any  # abstract
    x: Any  # abstract
    y: Any  # abstract
    device: jax.Device  # for which it is compiled, where the arguments are not on several devices

    @staticmethod
    def of(fn: Fn, params: Tree, x: Array, device: jax.Device) -> "TracedBlock":
        params, x = types_of(params), types_of(x)
        return TracedBlock(fn, params, x, _types_of_results(fn, params, x), device)

    def with_policy(self, names: Sequence[str]) -> Fn:
        return jax.checkpoint(self.fn, policy=policy_of(names))

    def work(self, kind: DeviceKind | None) -> tuple[Work, Work]:
        """Operations of the forward pass, and of the backward pass without recomputation."""
        forward = work_of(self.fn, self.params, self.x, kind=kind)
        return forward, self._step_work(self.fn, kind) - forward

    def recompute(self, names: Sequence[str], plain: Work, kind: DeviceKind | None) -> Work:
        """Operations beyond ``plain`` of a step that saves the named values alone."""
        return self._step_work(self.with_policy(names), kind) - plain

    def _step_work(self, fn: Fn, kind: DeviceKind | None) -> Work:
        def step(params: Tree, x: Array, cotangent: Tree) -> Any:
            y, vjp = jax.vjp(fn, params, x)
            return y, _floating(vjp(cotangent))

        return work_of(step, self.params, self.x, self.y, kind=kind)

    def named_values(self, kind: DeviceKind | None, names: Collection[str] | None) -> NamedValues:
        return NamedValues.of(self.fn, self.params, self.x, kind, names)

    def saved(self, names: Sequence[str]) -> int:
        """Bytes of one device that the block under its policy saves beyond its input."""
        return self._residuals(names) - self._residuals(()) if names else 0

    def _residuals(self, names: Sequence[str]) -> int:
        def residuals(params: Tree, x: Array) -> Any:
            return jax.tree.leaves(jax.vjp(self.with_policy(names), params, x)[1])

        return device_bytes(_types_of_results(residuals, self.params, self.x))


def _types_of_results(fn: Fn, params: Tree, x: Array) -> Any:
    """Types of what a function returns; of sharded arguments sharded as the compiler has it."""
    types = jax.eval_shape(fn, params, x)
    if is_sharded((params, x)):
        shardings = jax.jit(fn).lower(params, x).compile().output_shardings
        types = jax.tree.map(lambda t, s: t.update(sharding=s), types, shardings)
    return types


def step_temporaries(fn: Fn, params: Tree, x: Array, device: jax.Device) -> float:
    """Bytes of a compiled program that runs a function forward and backward."""
    # As in a training step, the cotangent of the result is computed from the result, unless it is a
    # loss, and that of the input is not returned. Infinite where the compiler gives up, as beyond a
    # TPU's memory.

    def loss(params: Tree, x: Array) -> Any:
        results = [y.astype(jnp.float32) for y in _floating(fn(params, x))]
        return sum(jnp.sum(jnp.square(y)) if y.ndim else y for y in results)

    def step(params: Tree, x: Array) -> Any:
        derivative = jax.vjp(lambda params: loss(params, x), params)[1]
        return _floating(derivative(jnp.float32(1.0)))

    try:
        compiled = compiled_for(step, (params, x), _floating(params), device)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.inf
    return temporaries_of(compiled)


def _floating(tree: Tree) -> list[Any]:
    """The leaves that have gradients; those of integers are of dtype float0."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def compiled_for(
    fn: Callable[..., Any], args: Any, results: Any, device: jax.Device, **jit: Any
) -> Any:
    """Compiles a function for its sharded arguments, or for a device if they are not sharded."""
    shardings: Any
    if is_sharded(args):
        shardings = jax.tree.map(lambda t: t.sharding, results)
    else:
        shardings = SingleDeviceSharding(device)
        args = jax.tree.map(lambda t: t.update(sharding=shardings), args)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        lowered = jax.jit(fn, out_shardings=shardings, **jit).lower(*args)
    return lowered.compile()


def evenly(frontier: Sequence[SavedNames], most: int | None) -> list[SavedNames]:
    """At most ``most`` choices of a frontier, its ends included; None for all."""
    if most is None or len(frontier) <= most:
        return list(frontier)
    step = (len(frontier) - 1) / (most - 1)
    return [frontier[round(i * step)] for i in range(most)]


def is_sharded(tree: Tree) -> bool:
    return any(x.sharding is not None for x in jax.tree.leaves(tree))


def device_bytes(tree: Tree) -> int:

    def of_one(x: Array) -> int:
        if x.sharding is None:
            return num_bytes(x)
        return math.prod(x.sharding.shard_shape(x.shape)) * int(x.dtype.itemsize)

    return sum(map(of_one, jax.tree.leaves(tree)))


def one_of(stack: Any) -> Any:
    def first(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding: Any = x.sharding
        if sharding is not None:
            spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
            sharding = NamedSharding(sharding.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)

    return jax.tree.map(first, types_of(stack))


def types_of(tree: Tree) -> Any:
    """Shapes, dtypes, and the shardings of arrays on several devices."""

    def type_of(x: Array) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            sharding = None
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)

    return jax.tree.map(type_of, tree)
