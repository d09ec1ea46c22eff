"""A model on a pipeline, its parameters as leaves, and functions over the axis of its stages."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sharding.pipeline._instructions import Instructions, instructions
from sharding.pipeline._layers import StageRows
from sharding.pipeline._schedule import Schedule
from sharding.pipeline._stage import Arrays, LayerParams
from sharding.placement._specs import AnyMesh, axes_of, is_spec


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model on a pipeline; see ``Pipeline``."""

    mesh: AnyMesh
    axis: str  # of the stages
    schedule: Schedule  # of a training step
    layer_counts: tuple[int, ...]  # of every virtual stage
    rows: StageRows
    embed: Callable[..., Any]
    block: Callable[..., Any]
    head: Callable[..., Any]
    has_aux: bool
    recompute: bool
    gather_layers: bool  # each where it runs

    @functools.cached_property
    def training(self) -> tuple[Schedule, Instructions]:
        """The schedule, and its instructions: made once, not in every trace."""
        return self.schedule, instructions(self.schedule, self.recompute)

    @functools.cached_property
    def evaluation(self) -> tuple[Schedule, Instructions]:
        """The schedule without its backward passes, and its instructions."""
        schedule = self.schedule.without_backward()
        return schedule, instructions(schedule, self.recompute)


class ParamTree(NamedTuple):
    """A tree of parameters whose leaves are handled apart: those that are trained, and others."""

    treedef: Any
    is_trained: list[bool]  # of each leaf

    def split(self, leaves: Arrays) -> LayerParams:
        """The trained leaves, and the others."""
        pairs = list(zip(leaves, self.is_trained, strict=True))
        return LayerParams([x for x, t in pairs if t], [x for x, t in pairs if not t])

    def join(self, params: LayerParams) -> Any:
        """The tree of leaves that ``split`` took apart."""
        parts = iter(params.trained), iter(params.frozen)
        return self.treedef.unflatten([next(parts[0 if t else 1]) for t in self.is_trained])

    def full(self, grads: Arrays, leaves: Arrays) -> Any:
        """The tree of gradients: zeros of leaves that are not trained."""
        return self.join(LayerParams(grads, [jnp.zeros_like(x) for x in self.split(leaves).frozen]))


def over_axis(
    model: Model,
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
    given = context.empty and AxisType.Explicit not in model.mesh.axis_types
    mapped: Callable[..., Any] = jax.shard_map(
        fn,
        mesh=model.mesh if given else None,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={model.axis},
        check_vma=False,
    )
    # Called eagerly, a shard_map over some of the axes knows nothing of the others.
    return jax.jit(on_auto_axes(model.mesh, mapped, out_types))


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


def spec_of_layers(model: Model, x: Any) -> PartitionSpec:
    """The spec of stacked layers on Explicit axes and on that of the stages."""
    spec = jax.typeof(x).sharding.spec
    named = any(model.axis in axes_of(entry) for entry in spec)
    return spec if named else model.rows.spec(x, spec)
