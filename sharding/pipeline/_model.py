"""Functions over the axis of a pipeline's stages."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sharding.placement._specs import AnyMesh, axes_of, is_spec

if TYPE_CHECKING:
    from sharding.pipeline._pipeline import Pipeline


def over_axis(
    pipeline: "Pipeline",
    fn: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    out_types: Any,
) -> Callable[..., Any]:
    """A ``shard_map`` over the pipeline's axis; other mesh axes stay as they are.

    ``in_specs`` and ``out_specs`` are those on that axis; ``out_types`` has those of the results on
    all axes, or a prefix, which Explicit axes require.
    """
    context = jax.sharding.get_abstract_mesh()
    # Inside another shard_map and inside auto_axes, the mesh is that of the context.
    given = context.empty and AxisType.Explicit not in pipeline.mesh.axis_types
    mapped: Callable[..., Any] = jax.shard_map(
        fn,
        mesh=pipeline.mesh if given else None,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={pipeline.axis},
        check_vma=False,
    )
    # Called eagerly, a shard_map over some of the axes knows nothing of the others.
    return jax.jit(on_auto_axes(pipeline.mesh, mapped, out_types))


def on_auto_axes(mesh: AnyMesh, fn: Callable[..., Any], out_types: Any) -> Callable[..., Any]:
    """A function inside which Explicit axes are Auto: those of the context, or of the mesh.

    ``out_types`` are specs of its results, or a prefix.
    """
    context = jax.sharding.get_abstract_mesh()
    mesh = mesh if context.empty else context
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if not explicit:
        return fn
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_types, is_leaf=is_spec)
    return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=shardings)


def spec_of_layers(pipeline: "Pipeline", x: Any) -> PartitionSpec:
    """The spec of stacked layers on Explicit axes and on that of the stages."""
    spec = jax.typeof(x).sharding.spec
    named = any(pipeline.axis in axes_of(entry) for entry in spec)
    return spec if named else pipeline._rows.spec(x, spec)
