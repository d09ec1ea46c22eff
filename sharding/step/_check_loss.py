"""Whether a loss, as sharded, is the loss of the batch on one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from optax_ext.equations import trace
from sharding._jaxprs import all_equations
from sharding._types import Array, Batch, Tree
from sharding.loss._loss_options import Loss, take_loss
from sharding.placement._specs import path_str
from sharding.placement._train_state import full_tree, model_state_of, params_of
from sharding.step._choose_program import LossCall
from sharding.step._loss import Inputs
from sharding.step.flax._nnx import is_module, pure_loss


def check_loss(
    zero: Any, loss_fn: Any, state: Tree, batch: Batch, key: Any, model_state: Tree, options: Any
) -> str:
    """Raises if value, gradient or new model state differ; see ``Zero.check_loss``."""
    loss, others, state, passed = _resolved(zero, loss_fn, state, model_state, options)
    inputs = params_of(state), batch, key, passed
    step = zero.value_and_grad(loss, **others)  # which checks them
    specs = zero._layout.place(inputs[0], others.get("param_specs")).params
    proof = LossCall(zero, step.loss, inputs[0], specs, Inputs(*inputs[1:])).prove()
    said = str(proof.rows) if proof.rows else f"not known: {proof.must_be_whole}"
    if proof.is_exact and not proof.is_sum:
        return said
    # What is lossy by request is no error of the loss.
    precision = dataclasses.replace(zero.precision, gather=None)
    sharded = dataclasses.replace(zero, sync=None, precision=precision)
    alone = dataclasses.replace(
        sharded, mesh=_one_shard(zero), stage=0, shard_state_over_replicas=False
    )

    def on_one(tree: Tree) -> Any:
        full = jax.tree.map(lambda x: x.addressable_data(0), zero.replicate(tree))
        return alone.replicate(full)

    def run(zero: Any, args: Any, **more: Any) -> tuple[Any, Any, Any]:
        value, grads = zero.value_and_grad(loss, **others | more)(*args)
        new: Any
        value, new = value if loss.has_aux or loss.model_state else (value, None)
        if loss.has_aux:
            new = new[0] if loss.model_state else None
        return value, grads, new

    def reference(*args: Any) -> Any:
        return run(alone, args, microbatches=1, param_specs=PartitionSpec())

    with jax.default_matmul_precision("highest"):
        own = on_one(inputs)
        found, expected = run(sharded, inputs), reference(*own)
        traced, _ = trace(reference, *own)
    dtypes = {str(v.aval.dtype) for eqn in all_equations(traced.jaxpr) for v in eqn.outvars}
    floating = [d for d in dtypes if d.startswith(("float", "bfloat", "complex"))]
    eps = max(float(jnp.finfo(jnp.dtype(d)).eps) for d in floating)
    differing: list[str] = []
    for name, tree, like in zip(("loss", "gradient", "model state"), found, expected, strict=True):
        differing += _differing(name, tree, like, eps)
    if differing:
        raise ValueError(_how_it_differs(zero, differing, said))
    return said


def _resolved(
    zero: Any, loss_fn: Any, state: Tree, model_state: Tree, options: Any
) -> tuple[Loss, dict[str, Any], Tree, Any]:
    """The loss, the other options, a train state, and the model state if there is one."""
    has_state = model_state is not False
    if has_state and not (isinstance(loss_fn, Loss) and loss_fn.model_state):
        options = options | {"model_state": True}
    if is_module(state):
        loss, others = take_loss(loss_fn, options, first="model")
        loss, state, rest = pure_loss(zero, loss, state)
        return loss, others, state, rest
    loss, others = take_loss(loss_fn, options)
    given = model_state if has_state else loss.model_state
    if given is True:
        raise ValueError(
            "check_loss got model_state=True, with which each call passes the model state: pass it "
            "here, too, as model_state=... in place of True."
        )
    names = (given,) if isinstance(given, str) else given
    if isinstance(names, tuple) and all(isinstance(name, str) for name in names):
        given = model_state_of(state, given)
    return loss, others, state, None if given is False else given


def _how_it_differs(zero: Any, differing: list[str], said: str) -> str:
    axes = zero._layout.data_axes
    axis = repr(axes[0] if len(axes) == 1 else axes)
    more = f", and {len(differing) - 6} more" if differing[6:] else ""
    return (
        f"on {zero.num_devices} devices the loss differs from that of the same batch on one: "
        f"{', '.join(differing[:6])}{more}. By its trace the loss is {said}. With per_device=True, "
        "and with coupled='by_microbatch', the mean of the losses of parts of the rows is another "
        "where rows meet: by a masked mean, a contrastive loss, statistics of the batch. Leave "
        "these out, and the loss is that of all rows; or in the loss of a device use "
        f"jax.lax.all_gather(x, {axis}, tiled=True) for the rows of all devices, "
        f"jax.lax.pmean(x, {axis}) for their mean, sharding.batch_moments(x, {axis}) in a batch "
        "norm (docs: understand/meaning)."
    )


def _one_shard(zero: Any) -> Mesh:
    """The mesh of one shard of the batch: this process's first, with the other axes as they are."""
    mesh = zero.mesh
    here = np.argwhere(mesh.devices == mesh.local_devices[0])[0]
    data = zero._layout.data_axes
    index = tuple(
        slice(i, i + 1) if name in data else slice(None)
        for i, name in zip(here, mesh.axis_names, strict=True)
    )
    return Mesh(mesh.devices[index], mesh.axis_names, axis_types=mesh.axis_types)


def _differing(name: str, tree: Tree, expected: Tree, eps: float) -> list[str]:
    """The leaves that differ by more than rounding, by their norm or that of the tree."""
    flat, like = jax.tree.leaves_with_path(tree), jax.tree.leaves(expected)
    leaves = [
        (path_str(path), _in_double(x), _in_double(y))
        for (path, x), y in zip(flat, like, strict=True)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    total = np.sqrt(sum(np.sum(np.abs(y) ** 2) for _, _, y in leaves))
    differing = []
    for path, x, y in leaves:
        by, norm = np.linalg.norm(np.ravel(x - y)), np.linalg.norm(np.ravel(y))
        if not by <= np.sqrt(eps) * norm + 16 * eps * total:  # NaN differs
            change = f"{by:.2g} off its norm of {norm:.2g}" if x.ndim else f"{x:.6g} for {y:.6g}"
            differing.append(f"{name}{path and f' of {path!r}'} ({change})")
    return differing


def _in_double(x: Array) -> np.ndarray:
    full = full_tree(x)
    return full.astype(np.result_type(full, np.float64))
