"""An nnx model and its optimizer on a mesh: their placement, and the model in a loss."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sharding._types import Batch, OptState, Tree
from sharding.step._batch_moments import set_axes
from sharding.step._sync_state import sync_state_types
from sharding.step.flax._modules import check_found, gathered_module, matches


class _Nnx:
    """``flax.nnx``, imported where it is used."""

    def __getattr__(self, name: str) -> Any:
        from flax import nnx

        return getattr(nnx, name)


nnx: Any = _Nnx()


def init_model(zero: Any, make: Callable[..., Any], args: Any, param_specs: Tree) -> Any:
    """Model and optimizer as ``make(*args)`` makes them, each device its own shard."""

    def arrays(*args: Any) -> Any:
        model, optimizer = make(*args)
        _, params, rest = nnx.split(model, optimizer.wrt, ...)
        return nnx.as_pure(((params, optimizer.opt_state), rest, optimizer.step))

    with nnx.use_eager_sharding(False):  # placed below
        model, optimizer = nnx.eval_shape(make, *args)
        shardings = _shardings(zero, model, optimizer, param_specs)
        replicated = zero._layout.replicated
        run = jax.jit(arrays, out_shardings=(shardings, replicated, replicated))
        (params, opt_state), rest, step = run(*args)
    nnx.update(model, params, rest)
    set_opt_state(optimizer, opt_state)
    optimizer.step.set_value(step)
    return model, optimizer


def place_model(zero: Any, model: Any, optimizer: Any) -> None:
    """Moves a model and its optimizer onto the mesh, in place."""
    _, params, rest = nnx.split(model, optimizer.wrt, ...)
    shardings = _shardings(zero, model, optimizer, None)
    state = zero._layout.copy(nnx.as_pure((params, optimizer.opt_state)), shardings)
    nnx.update(model, state[0], zero._layout.copy(nnx.as_pure(rest), zero._layout.replicated))
    set_opt_state(optimizer, state[1])


def _shardings(zero: Any, model: Any, optimizer: Any, param_specs: Tree) -> Any:
    params = nnx.state(model, optimizer.wrt)
    if param_specs is None:
        param_specs = nnx.as_pure(nnx.get_partition_spec(params))
    state = nnx.as_pure((params, optimizer.opt_state))
    if zero.sync is not None:
        placed = zero._layout.place(state[0], param_specs)
        if sync_state_types(zero._layout, zero.sync, state[0], placed) is not None:
            raise ValueError(
                "sync: this gradient sync has a state, which an nnx.Optimizer cannot store. "
                "Use train_step with the pair (params, opt_state) of nnx.split, or a sync without "
                "a state."
            )
    return zero.shardings(state, tx=optimizer.tx, param_specs=param_specs)


def is_placed(tree: Tree, mesh: Any) -> bool:
    """Whether every array but scalars is on all devices of the mesh."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.ndim]
    return all(x.sharding.device_set == set(mesh.devices.flat) for x in leaves)


def set_opt_state(optimizer: Any, opt_state: OptState) -> None:
    treedef = jax.tree.structure(optimizer.opt_state)
    optimizer.opt_state = nnx.data(treedef.unflatten(jax.tree.leaves(opt_state)))


def prepare(zero: Any, model: Any) -> None:
    """Makes modules act on a sharded batch, and call ``gather`` on their parameters."""
    blocks = zero.gathered_blocks
    gathered: list[tuple[Any, ...]] = []
    found: set[str] = set()
    modules = sorted(nnx.iter_modules(model), key=lambda item: len(item[0]))  # outermost first
    named = [(path, type(m).__name__, "/".join(map(str, path)), m) for path, m in modules]
    for path, cls, name, module in named:
        if isinstance(module, nnx.BatchNorm) and zero.view == "device":
            set_axes(module, zero._layout.data_axes)
        own = {pattern for pattern in blocks if matches(pattern, cls, name)}
        found |= own
        if own and not any(path[: len(outer)] == outer for outer in gathered):
            gathered.append(path)
            module.__class__ = gathered_module(type(module), None, zero._layout.recomputes)
    seen = [(cls, name) for _, cls, name, _ in named[1:]]
    check_found(blocks, found, "a module of the model. It has", seen)


def model_in_step(zero: Any, graph: Any, *states: Any) -> Any:
    model = nnx.merge(graph, *states, copy=True)
    prepare(zero, model)
    return model


def values_at(old: Tree, new: Tree) -> Any:
    """The pure values of ``new`` at the paths of ``old``; what a loss sows is dropped."""
    values = dict(nnx.to_flat_state(new))
    paths = [path for path, _ in nnx.to_flat_state(old)]
    for path in paths:
        if path not in values:
            name = "/".join(map(str, path))
            raise ValueError(
                f"the loss removed the variable {name!r} of the model, which a step requires. "
                "Reset its value instead."
            )
    return nnx.as_pure(nnx.from_flat_state([(path, values[path]) for path in paths]))


def is_module(x: Any) -> bool:
    """Whether it is an nnx model; without Flax there are none."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def pure_loss(
    zero: Any, loss_fn: Callable[..., Any], model: Any, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Any, Any]:
    """The loss of a model as one of ``(params, batch, rest)``, with a state, and the rest."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Tree, batch: Batch, rest: Any, *key: Any) -> Any:
        model = model_in_step(zero, graph, params, rest)
        out = loss_fn(model, batch, *key)
        value, aux = out if options.get("has_aux") else (out, None)
        new = values_at(rest, nnx.split(model, nnx.Param, ...)[2])
        return value, ((new, aux) if options.get("has_aux") else new)

    params, rest = nnx.as_pure((params, rest))
    return loss, (params, None), rest
