"""Bytes of the compiled program of a loss and its gradient."""

import contextlib
import functools
import math
import tempfile
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from sharding._jaxprs import all_equations
from sharding._types import Array, Batch, Tree
from sharding.plan.audit._liveness import temporaries_of


def step_temporaries(
    fn: Callable[[Any, Any], Any],
    params: Tree,
    batch: Batch,
    device: jax.Device,
    *,
    value: bool = True,
) -> float:
    """Bytes of a compiled program that returns a loss, its other results, and its gradient.

    As ``jax.value_and_grad`` does, or without the ``value`` as ``jax.grad``. Infinite where the
    compiler gives up, as beyond a TPU's memory.
    """

    def step(params: Tree, batch: Batch) -> Any:
        def loss(params: Tree) -> Any:
            first, *others = jax.tree.leaves(fn(params, batch))
            return jnp.asarray(first), others

        # The order of results decides in which order XLA computes them.
        grad = jax.value_and_grad if value else jax.grad
        found = grad(loss, has_aux=True, allow_int=True)(params)
        return (found[0], _floating(found[1])) if value else (_floating(found[0]), found[1])

    args, shardings = (params, batch), cast(Any, None)
    if is_sharded(args):
        of_grads = [t.sharding for t in _floating(params)]
        shardings = (None, of_grads) if value else (of_grads, None)
    elif not _on_several(jax.make_jaxpr(step)(*args).jaxpr, device):
        shardings = SingleDeviceSharding(device)
        args = jax.tree.map(lambda t: t.update(sharding=shardings), args)
    try:
        lowered = jax.jit(step, out_shardings=shardings).lower(*args)
        # Programs that are not run: no time is spent on fast instructions, which change no bytes.
        options: dict[str, Any] = {"xla_backend_optimization_level": 0}
        if device.platform != "cpu":
            options = _kernels()[0] if device.platform in ("cuda", "gpu") else {}
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


def _on_several(jaxpr: Any, device: jax.Device) -> bool:
    """Whether a program is one of this device and others, by its meshes or that of the context."""
    values = (x for eqn in all_equations(jaxpr) for x in jax.tree.leaves([*eqn.params.values()]))
    meshes = [getattr(x, "mesh", x) for x in values]
    with contextlib.suppress(ValueError):  # inside jit, where meshes are abstract
        meshes.append(jax.sharding.get_mesh())
    meshes = [mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)]
    return any(mesh.size > 1 and device in mesh.devices.flat for mesh in meshes)


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
