"""Runs code on a layout's mesh: contexts, Explicit axes, ``shard_map`` over some of its axes."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from sharding._types import Tree
from sharding.placement._layout import Layout
from sharding.placement._specs import AnyMesh, is_spec, only_axes


def on_mesh(
    layout: Layout, fn: Callable[..., Tree], out_shardings: Callable[[Tree], Tree]
) -> Callable[..., Tree]:
    """``fn(layout, *args)`` as a function of ``args``, for which all mesh axes are Auto.

    On Explicit axes ``auto_axes`` requires shardings of the outputs, which follow from their
    shapes; these come from tracing ``fn`` on an Auto twin of the mesh.
    """
    run = functools.partial(fn, layout)

    @functools.wraps(run)  # compiled programs name its arguments
    def call(*args: Tree) -> Tree:
        check_context(layout.mesh)
        if not layout.explicit_axes:
            with _named_axes(layout):
                return run(*args)
        types = jax.tree.map(jax.typeof, args)
        shapes = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), types)
        auto = layout.mesh.update(axis_types=(AxisType.Auto,) * len(layout.mesh.axis_names))
        traced = dataclasses.replace(layout, mesh=auto, traced_axes=layout.explicit_axes)
        twin = functools.partial(fn, traced)
        abstract = auto.abstract_mesh if isinstance(auto, Mesh) else auto
        with jax.sharding.use_abstract_mesh(abstract):
            out = out_shardings(jax.eval_shape(twin, *shapes))
        # On a mesh with axes of both types, Auto axes are no part of the types of outputs.
        out = jax.tree.map(
            lambda s: NamedSharding(layout.mesh, only_axes(s.spec, layout.explicit_axes)), out
        )
        return jax.sharding.auto_axes(run, axes=layout.explicit_axes, out_sharding=out)(*args)

    return call


def _named_axes(layout: Layout) -> contextlib.AbstractContextManager[Any]:
    """A context in which a partitioned loss may name axes where no mesh is set."""
    if layout.per_device or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    mesh = layout.mesh
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh)


class NamedAxes:
    """Axes that are Auto for a loss, or Explicit once it names one, as ``out_sharding`` does.

    Arrays then have the types that they have under ``jit``.
    """

    def __init__(self, axes: Iterable[str], errors: tuple[str, ...]):
        """``errors``: how jax rejects shardings in types where axes are Auto."""
        self.axes = tuple(axes)
        self.are_named = False
        self._errors = errors

    def names_types(self, error: ValueError) -> bool:
        return bool(self.axes) and any(text in str(error) for text in self._errors)

    def run(
        self, fn: Callable[..., Any], specs: tuple[Any, ...], *args: Any, of_types: bool = False
    ) -> Any:
        """``fn(*args)``, of arrays, or of types, that on these axes have ``specs``."""
        if not self.are_named:
            try:
                return fn(*args)
            except ValueError as error:
                self.are_named = self.names_types(error)
                if not self.are_named:
                    raise
        specs = jax.tree.map(lambda spec: only_axes(spec, self.axes), specs, is_leaf=is_spec)
        typed = jax.sharding.explicit_axes(fn, axes=self.axes, in_sharding=specs)
        return jax.eval_shape(typed, *args) if of_types else typed(*args)


def over_data_axes(
    layout: Layout, fn: Callable[..., Tree], in_specs: Tree, out_specs: Tree, axes: Any = None
) -> Callable[..., Tree]:
    """A ``shard_map`` of ``fn`` over the data axes, or others; the rest has the partitioner."""
    return jax.shard_map(
        fn,
        # Inside auto_axes the mesh is that of the context.
        mesh=None if layout.explicit_axes else layout.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes or layout.data_axes),
        # With it, the transpose would sum the gradients of unsharded parameters by itself.
        check_vma=False,
    )


def over_other_axes(
    layout: Layout, fn: Callable[..., Tree], in_specs: Tree, out_specs: Tree
) -> Callable[..., Tree]:
    """``fn`` on the blocks that a device has on the other axes; for use in ``over_data_axes``.

    Left to the partitioner, collectives over the data axes would gather arrays over the others.
    """
    if not layout.other_axes:
        return fn
    return jax.shard_map(
        fn, in_specs=in_specs, out_specs=out_specs, axis_names=layout.other_axes, check_vma=False
    )


# How jax rejects shardings in a shard_map that name its axes, and arrays that are on the full mesh.
_NAMED = r"AxisType\.Manual|can only refer to Auto axes|contains a manual axes|the mesh of sharding"
_UNBOUND = r"unbound axis name"
_OUTSIDE = r"Closing over|should match the aval mesh"


@contextlib.contextmanager
def with_remedies(layout: Layout) -> Iterator[None]:
    """Errors of jax about arrays and shardings of a loss, from here with what to do about them."""
    try:
        yield
    except (NameError, NotImplementedError, ValueError) as error:
        if not layout.per_device:
            named = re.search(_UNBOUND, str(error))
            if not named:
                raise
            remedy = (
                "the loss has a collective over an axis of the mesh. It gets the whole batch, as "
                "under jit: leave the collective out (jnp.mean(x) for pmean(x.mean()), x for "
                "all_gather(x)), or write a jax.shard_map around it. Or make it the loss of each "
                "device's rows, by shd.Loss(loss_fn, per_device=True) (docs: "
                "understand/meaning)."
            )
        elif re.search(_OUTSIDE, str(error)):
            remedy = (
                "the loss closes over an array on a mesh of Explicit axes, or makes one by a "
                "NamedSharding, which jax does not support. Name a PartitionSpec; pass the array "
                "as model_state (train_step, value_and_grad and eval_step take it), close over a "
                "NumPy array, or make the mesh with axis_types="
                f"(jax.sharding.AxisType.Auto,) * {len(layout.mesh.axis_names)}."
            )
        elif re.search(_NAMED, str(error)):
            remedy = (
                f"the loss requests a sharding over the data axes {layout.data_axes}, such as by "
                "out_sharding, reshard or with_sharding_constraint, or by a NamedSharding on the "
                "full mesh. With per_device=True each device has its shard of the batch: leave "
                "that out of the Loss, or write a PartitionSpec of the other axes, such as "
                "P(None, 'model') for P('data', 'model') (docs: understand/meaning)."
            )
        else:
            raise
        raise ValueError(f"{remedy} jax says: {error}") from error


def no_mesh(keep: AnyMesh | None = None) -> contextlib.AbstractContextManager[Any]:
    """A context without a mesh, whatever ``jax.set_mesh`` set; inside ``jit``, no change.

    ZeRO names its own mesh everywhere. A function then compiles once for calls from all contexts.
    ``keep`` stays if it is in the context with Auto axes; so does an empty context, which for the
    caches of jax differs from one that is set to be empty.
    """
    if keep is not None:
        current = jax.sharding.get_abstract_mesh()
        same = _axis_sizes_and_types(current) == _axis_sizes_and_types(keep)
        if current.empty or (same and set(current.axis_types) == {AxisType.Auto}):
            return contextlib.nullcontext()
    return _set_mesh(None)


def _set_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    try:
        return jax.set_mesh(mesh)
    except ValueError:  # inside jit, where a mesh can only be checked
        return contextlib.nullcontext()


def step_context(layout: Layout) -> contextlib.AbstractContextManager[Any]:
    """``no_mesh``, or of a partitioned loss the context of the mesh, whose axes it may name."""
    if layout.per_device or not isinstance(layout.mesh, Mesh):
        return no_mesh()
    return _set_mesh(layout.mesh)


def check_context(mesh: AnyMesh) -> None:
    """Raises if the context, inside ``jit``, has another mesh."""
    current = jax.sharding.get_abstract_mesh()
    same = _axis_sizes_and_types(current) == _axis_sizes_and_types(mesh)
    if not (current.empty or current.manual_axes or same):
        raise ValueError(
            f"inside jit, the mesh of the context is {_printed(current)} and that of Zero is "
            f"{_printed(mesh)}. Call the jitted function under jax.set_mesh(zero.mesh), or where "
            "no mesh is set."
        )


def _axis_sizes_and_types(mesh: AnyMesh) -> tuple[Any, Any]:
    return tuple(mesh.shape.items()), mesh.axis_types


def _printed(mesh: AnyMesh) -> str:
    axes = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return "(" + ", ".join(f"{name}={size} {kind.name}" for (name, size), kind in axes) + ")"
