"""Bytes of the compiled program of a loss and its gradient."""

import functools
import math
import tempfile
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from sharding._types import Array, Batch, Tree
from sharding.plan.audit._liveness import temporaries_of


def step_temporaries(
    fn: Callable[[Any, Any], Any], params: Tree, batch: Batch, device: jax.Device
) -> float:
    """Bytes of a compiled program that returns the gradient of a loss, and its other results."""
    # Infinite where the compiler gives up, as beyond a TPU's memory.

    def step(params: Tree, batch: Batch) -> Any:
        def loss(params: Tree) -> Any:
            first, *others = jax.tree.leaves(fn(params, batch))
            return jnp.asarray(first), others

        value, derivative, others = jax.vjp(loss, params, has_aux=True)
        return _floating(derivative(jnp.ones_like(value))), others

    args, shardings = (params, batch), cast(Any, SingleDeviceSharding(device))
    if is_sharded(args):
        shardings = [t.sharding for t in _floating(params)], None
    else:
        args = jax.tree.map(lambda t: t.update(sharding=shardings), args)
    try:
        lowered = jax.jit(step, out_shardings=shardings).lower(*args)
        options, _ = _kernels() if device.platform in ("cuda", "gpu") else ({}, None)
        return temporaries_of(lowered.compile(options))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.inf


@functools.cache
def _kernels() -> tuple[dict[str, Any], Any]:
    """Options of XLA for GPUs: programs of a search share their kernels, most of their seconds."""
    folder = tempfile.TemporaryDirectory()  # until this process ends
    file = f"{folder.name}/kernels"
    parallel = "xla_gpu_enable_llvm_module_compilation_parallelism"
    return {"xla_gpu_kernel_cache_file": file, parallel: True}, folder


def _floating(tree: Tree) -> list[Any]:
    """The leaves that have gradients; those of integers are of dtype float0."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def is_sharded(tree: Tree) -> bool:
    return any(x.sharding is not None for x in jax.tree.leaves(tree))


def types_of(tree: Tree) -> Any:
    """Shapes, dtypes, and the shardings of arrays on several devices."""

    def type_of(x: Array) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            sharding = None
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)

    return jax.tree.map(type_of, tree)
