"""How a mesh is used: which axes cut what, and how code gets onto it."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding import _specs
from sharding._specs import AnyMesh

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, a ZeRO stage, and how both cut parameters and batches.

    Attributes:
      mesh: the device mesh.
      stage: 0, 1 or 2.
      axis: the mesh axis, or axes, of data parallelism.
      min_shard_size: parameters of fewer elements are not cut.
    """

    mesh: AnyMesh
    stage: int
    axis: str | tuple[str, ...]
    min_shard_size: int

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of data parallelism."""
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def other_axes(self) -> frozenset[str]:
        """The user's axes of the mesh."""
        return frozenset(self.mesh.axis_names) - set(self.axes)

    @property
    def explicit_axes(self) -> tuple[str, ...]:
        """The axes whose shardings are part of the types."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return tuple(name for name, kind in types if kind == AxisType.Explicit)

    @property
    def num_shards(self) -> int:
        """The number of data-parallel devices."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def param_specs(self, params: Any, given: Any = None) -> Any:
        """The spec of every parameter: given, else as the arrays lie, else Flax's, else whole."""
        if given is None:
            found = [_specs.sharding_on(leaf, self.mesh) for leaf in jax.tree.leaves(params)]
            if found and None not in found:
                treedef: Any = jax.tree.structure(params)
                given = treedef.unflatten([s.spec for s in found if s])
        return _specs.resolve_param_specs(params, given, self.mesh)

    def cuts(self, params: Any, param_specs: Any) -> tuple[Any, Any, Any]:
        """Trees of how each gradient shard lies, the dim it is cut along (-1: whole), and why."""
        treedef: Any = jax.tree.structure(params)
        specs = treedef.flatten_up_to(param_specs)
        cuts = []
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(params), specs, strict=True
        ):
            if set(self.axes) & {axis for entry in spec for axis in _specs.axes_of(entry)}:
                raise ValueError(
                    f"parameter {_specs.path_str(path)!r} already lies on axis {self.axis!r} "
                    f"({spec}); at stage {self.stage} parameters are whole along it."
                )
            if self.stage == 0:
                cuts.append((spec, -1, ""))
            else:
                shape = tuple(leaf.shape)
                cuts.append(
                    _specs.add_axis(shape, spec, self.axis, self.num_shards, self.min_shard_size)
                )
        return tuple(treedef.unflatten([cut[i] for cut in cuts]) for i in range(3))

    def batch_specs(self, tree: Any) -> Any:
        """Cut along the first dim; scalars are replicated."""
        return jax.tree.map(lambda x: P(self.axis) if np.ndim(x) else P(), tree)

    def batch_shardings(self, tree: Any) -> Any:
        """``batch_specs`` on the mesh."""
        return self.shardings(self.batch_specs(tree))

    def shard_map(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """``fn`` on each device of the data axes; other axes are left to the partitioner."""
        return jax.shard_map(
            fn,
            # Inside auto_axes the mesh is that of the context.
            mesh=None if self.explicit_axes else self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.axes),
            # With it, the transpose would sum the gradients of whole parameters by itself.
            check_vma=False,
        )

    def shardings(self, specs: Any) -> Any:
        """A ``NamedSharding`` for every spec of a tree."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_specs.is_spec
        )

    def constrain(self, tree: Any, specs: Any) -> Any:
        """Tells the partitioner how a tree lies; for use inside ``on_mesh``."""
        if not self.explicit_axes:
            specs = self.shardings(specs)
        return jax.lax.with_sharding_constraint(tree, specs)

    def on_mesh(self, fn: Callable[..., Any], shardings: Callable[[Any], Any]) -> Any:
        """``fn(layout, *args)`` as a function of ``args``, all axes of the mesh made Auto for it.

        Explicit axes want to know how the outputs lie: ``shardings`` tells it from their shapes,
        which an Auto twin of the mesh gives.
        """
        if not self.explicit_axes:
            return functools.partial(fn, self)
        auto = (AxisType.Auto,) * len(self.mesh.axis_names)
        if isinstance(self.mesh, Mesh):
            mesh: AnyMesh = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=auto)
        else:
            mesh = self.mesh.update(axis_types=auto)
        twin = dataclasses.replace(self, mesh=mesh)

        def call(*args: Any) -> Any:
            types = jax.tree.map(jax.typeof, args)
            shapes = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), types)
            out = shardings(jax.eval_shape(functools.partial(fn, twin), *shapes))
            run = functools.partial(fn, self)
            return jax.sharding.auto_axes(run, axes=self.explicit_axes, out_sharding=out)(*args)

        return call
