"""How a mesh is used: which axes cut what, and how code gets onto it."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.placement import _specs
from sharding.placement._specs import AnyMesh, Axis

P = PartitionSpec
# The last dim is cut into multiples of this, or another is: blocks of quantized state stay whole,
# and so do a TPU's registers (its compiler takes three times as long over narrower pieces).
_WHOLE = 256
_LONG = 64  # elements of a dim that may be cut in place of the last


class Placement(NamedTuple):
    """How parameters lie; trees as the parameters.

    Attributes:
      params: specs between steps.
      shards: specs of the reduced gradients, and of the parameters while they are updated.
      dims: the dim that is cut, counted from the end; 0: the parameter is whole.
      reasons: why it is whole.
    """

    params: Any
    shards: Any
    dims: Any
    reasons: Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, a ZeRO stage, and how both cut parameters and batches.

    Attributes:
      mesh: the device mesh.
      stage: 0 to 3.
      axis: the mesh axis, or axes, to cut over.
      replica_axis: the mesh axis, or axes, of copies; None for none.
      shard_state_over_replicas: cut gradients and optimizer state over the copies, too.
      min_shard_size: parameters of fewer elements are not cut.
      scatter: the form of the reduce-scatter, or ``"auto"``.
      unsharded: patterns of the paths of parameters that ZeRO does not shard.
    """

    mesh: AnyMesh
    stage: int
    axis: Axis
    replica_axis: Axis | None = None
    shard_state_over_replicas: bool = False
    min_shard_size: int = 0
    scatter: str = "auto"
    unsharded: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that parameters and state are cut over."""
        return _specs.axes_of(self.axis)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes that hold copies."""
        return _specs.axes_of(self.replica_axis)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that the batch is cut over, in the order of the mesh."""
        both = self.axes + self.replica_axes
        return tuple(name for name in self.mesh.axis_names if name in both)

    @property
    def other_axes(self) -> frozenset[str]:
        """The user's axes of the mesh."""
        return frozenset(self.mesh.axis_names) - set(self.data_axes)

    @property
    def explicit_axes(self) -> tuple[str, ...]:
        """The axes whose shardings are part of the types."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return tuple(name for name, kind in types if kind == AxisType.Explicit)

    @property
    def num_shards(self) -> int:
        """Into how many parts parameters or state are cut."""
        return self._size(self.axes)

    @property
    def num_replicas(self) -> int:
        """How many copies there are of each part."""
        return self._size(self.replica_axes)

    @property
    def num_devices(self) -> int:
        """The number of data-parallel devices."""
        return self.num_shards * self.num_replicas

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    # --- Parameters ---------------------------------------------------------------------------

    def place(self, params: Any, given: Any = None) -> Placement:
        """How parameters lie: along other axes as given, else as they do, else by Flax metadata.

        Raises:
          ValueError: if the specs do not fit the parameters or the mesh.
        """
        if given is None:
            found = [_specs.sharding_on(leaf, self.mesh) for leaf in jax.tree.leaves(params)]
            # Types that are replicated, as arguments on a mesh make them, ask for nothing.
            asked = any(s and (isinstance(s.mesh, Mesh) or any(s.spec)) for s in found)
            if asked and None not in found:
                treedef: Any = jax.tree.structure(params)
                given = treedef.unflatten([s.spec for s in found if s])
        specs = _specs.resolve_param_specs(params, given, self.mesh)
        treedef = jax.tree.structure(params)
        placed = [
            self._place_leaf(_specs.path_str(path), leaf, spec)
            for (path, leaf), spec in zip(
                jax.tree_util.tree_leaves_with_path(params),
                treedef.flatten_up_to(specs),
                strict=True,
            )
        ]
        return Placement(*(treedef.unflatten([leaf[i] for leaf in placed]) for i in range(4)))

    def _place_leaf(self, path: str, leaf: Any, spec: P) -> tuple[P, P, int, str]:
        shape = tuple(leaf.shape)
        entries = list(spec) + [None] * (len(shape) - len(spec))
        taken = [d for d, e in enumerate(entries) if set(_specs.axes_of(e)) & set(self.data_axes)]
        if taken and self.stage < 3:
            raise ValueError(
                f"parameter {path!r} already lies on axis {self.axis!r} ({spec}); at stage "
                f"{self.stage} parameters are whole along the axes of data parallelism."
            )
        if len(taken) > 1 or (taken and _specs.axes_of(entries[taken[0]]) != self.axes):
            raise ValueError(
                f"parameter {path!r} lies as {spec}; of the axes of data parallelism a parameter "
                f"is cut over {self.axis!r} alone, along one dim that no other axis cuts."
            )
        if taken:
            dim, reason = taken[0], ""
            entries[dim] = None
            spec = P(*entries)
        else:
            dim, reason = self._choose_dim(path, leaf, entries)
        if dim < 0:
            return spec, spec, 0, reason
        inner = _specs.with_axis(spec, len(shape), dim, self.axis)
        shards = inner
        if self.shard_state_over_replicas and shape[dim] % self.num_devices == 0:
            shards = _specs.with_axis(spec, len(shape), dim, self.axes + self.replica_axes)
        return inner if self.stage == 3 else spec, shards, dim - len(shape), ""

    def _choose_dim(self, path: str, leaf: Any, entries: list[Any]) -> tuple[int, str]:
        """The longest free dim that divides, or one nearly as long; else -1, and why."""
        if self.stage == 0:
            return -1, ""
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return -1, f"whole: {leaf.dtype} is not a number"
        asked = next((p for p in self.unsharded if re.search(p, path)), None)
        if asked is not None:
            return -1, f"whole: asked for by unsharded={asked!r}"
        shape, size = tuple(leaf.shape), math.prod(leaf.shape)
        if size < max(self.min_shard_size, 1):
            return -1, f"whole: {size} elements, min_shard_size is {self.min_shard_size}"
        free = [d for d, e in enumerate(entries) if e is None and shape[d]]
        parts = [self.num_shards]
        if self.shard_state_over_replicas:
            parts.insert(0, self.num_devices)
        for count in parts:
            fit = [d for d in free if shape[d] % count == 0]
            if fit:
                best = max(fit, key=lambda d: (shape[d], -d))
                if best == len(shape) - 1 and shape[best] // count % _WHOLE:
                    # Not a short dim instead: it may be a stack's.
                    others = [d for d in fit if d != best and shape[d] >= _LONG]
                    best = max(others, key=lambda d: (shape[d], -d), default=best)
                return best, ""
        return -1, f"whole: no free dim of {shape} divides by {self.num_shards}"

    def manual_spec(self, spec: P) -> P:
        """What of a spec a ``shard_map`` over the data axes has to know."""
        return _only(spec, self.data_axes)

    def other_spec(self, spec: P) -> P:
        """What of a spec is the user's."""
        return _only(spec, self.other_axes)

    def keep_axes(self, spec: P, axes: Collection[str]) -> P:
        """A spec that of the axes of data parallelism names these alone."""
        return _only(spec, self.other_axes | set(axes))

    @property
    def platform(self) -> str:
        """That of the devices, such as ``tpu``; ``unknown`` of an abstract mesh."""
        devices = self.mesh.devices.flat if isinstance(self.mesh, Mesh) else [None]
        return getattr(devices[0], "platform", "unknown")

    # --- Batches ------------------------------------------------------------------------------

    def batch_specs(self, tree: Any) -> Any:
        """ArrayLayout along the first dim; scalars are replicated."""
        entry = _specs.entry_of(self.data_axes)
        return jax.tree.map(lambda x: P(entry) if np.ndim(x) else P(), tree)

    def batch_shardings(self, tree: Any) -> Any:
        """``batch_specs`` on the mesh."""
        return self.shardings(self.batch_specs(tree))

    @property
    def replicated(self) -> NamedSharding:
        """On every device in full."""
        return NamedSharding(self.mesh, P())

    def place_batch(self, batch: Any) -> Any:
        """A batch with its arrays that are elsewhere, such as on one device, moved to the mesh.

        Others, ``jit`` moves: those of NumPy, and of devices that nobody chose.
        """

        def place(x: Any, want: NamedSharding) -> Any:
            if not _is_committed(x) or x.sharding.is_equivalent_to(want, x.ndim):
                return x
            return jax.device_put(x, want)

        return jax.tree.map(place, batch, self.batch_shardings(batch))

    def bring(self, args: Any) -> Any:
        """Arguments with their arrays that are on other devices than the mesh's, replicated."""
        if not isinstance(self.mesh, Mesh):
            return args
        devices = set(self.mesh.devices.flat)

        def place(x: Any) -> Any:
            if not _is_committed(x) or x.sharding.device_set == devices:
                return x
            return jax.device_put(x, self.replicated)

        return jax.tree.map(place, args)

    def copy(self, tree: Any, shardings: Any) -> Any:
        """Arrays moved to the mesh, in memory of their own.

        ``device_put`` lets an array that is there already share its memory with the result, and a
        step that is given both, one of them to donate, ends the process.
        """
        moved = jax.device_put(tree, shardings)
        return jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=shardings)(moved)

    # --- Code ---------------------------------------------------------------------------------

    def shard_map(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """``fn`` on each device of the data axes; other axes are left to the partitioner.

        Raises:
          ValueError: in the call, in place of errors of jax that do not say what to do.
        """
        mapped = jax.shard_map(
            fn,
            # Inside auto_axes the mesh is that of the context.
            mesh=None if self.explicit_axes else self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.data_axes),
            # With it, the transpose would sum the gradients of whole parameters by itself.
            check_vma=False,
        )

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            try:
                return mapped(*args)
            except NotImplementedError as error:
                raise self._explained(error) from error

        return call

    def _explained(self, error: NotImplementedError) -> Exception:
        """What a user can do about an error of jax; the error itself where that is not known."""
        if "Closing over" in str(error):
            return ValueError(
                "the loss closes over an array that is on a mesh of Explicit axes, which jax does "
                "not support. Pass it as model_state (train_step, value_and_grad and eval_step "
                "take it), close over a NumPy array, or make the mesh with axis_types="
                f"(jax.sharding.AxisType.Auto,) * {len(self.mesh.axis_names)}. jax says: {error}"
            )
        if "`Manual` AxisType" in str(error):
            return ValueError(
                "the loss asks for a sharding over the axes of data parallelism "
                f"{self.data_axes}, such as by out_sharding or reshard. In a step each device has "
                "its shard of the batch, and these axes cannot be named: leave the argument out, "
                f"or name other axes of the mesh. jax says: {error}"
            )
        return error

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

            @functools.wraps(functools.partial(fn, self))
            def checked(*args: Any) -> Any:
                check_context(self.mesh)
                return fn(self, *args)

            return checked
        auto = (AxisType.Auto,) * len(self.mesh.axis_names)
        if isinstance(self.mesh, Mesh):
            mesh: AnyMesh = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=auto)
        else:
            mesh = self.mesh.update(axis_types=auto)
        twin = dataclasses.replace(self, mesh=mesh)

        @functools.wraps(functools.partial(fn, self))  # so that programs name its arguments
        def call(*args: Any) -> Any:
            check_context(self.mesh)
            types = jax.tree.map(jax.typeof, args)
            shapes = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), types)
            with jax.sharding.use_abstract_mesh(_abstract(mesh)):
                out = shardings(jax.eval_shape(functools.partial(fn, twin), *shapes))
            # Of a mesh with axes of both kinds: Auto ones are no part of types.
            out = jax.tree.map(
                lambda at: NamedSharding(self.mesh, _only(at.spec, self.explicit_axes)), out
            )
            run = functools.partial(fn, self)
            return jax.sharding.auto_axes(run, axes=self.explicit_axes, out_sharding=out)(*args)

        return call


def _is_committed(x: Any) -> bool:
    """Whether a real array is where somebody asked for it."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed


def _abstract(mesh: AnyMesh) -> AbstractMesh:
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def no_mesh(keep: AnyMesh | None = None) -> contextlib.AbstractContextManager[Any]:
    """No mesh in the context, whatever ``jax.set_mesh`` set; inside ``jit``, what there is.

    All of ZeRO names its own mesh. A function then compiles once, for calls from everywhere.

    Args:
      keep: a mesh that stays in the context if it is there and its axes are Auto. An empty context
        stays as it is, too: to the caches of jax one that is set empty is another.
    """
    if keep is not None:
        found = jax.sharding.get_abstract_mesh()
        same = _kind(found) == _kind(_abstract(keep))
        if found.empty or (same and set(found.axis_types) == {AxisType.Auto}):
            return contextlib.nullcontext()
    try:
        return jax.set_mesh(None)
    except ValueError:  # inside jit, where a mesh can only be checked
        return contextlib.nullcontext()


def check_context(mesh: AnyMesh) -> None:
    """Raises if the context, inside ``jit``, has another mesh."""
    found, wanted = jax.sharding.get_abstract_mesh(), _abstract(mesh)
    if not (found.empty or found.manual_axes or _kind(found) == _kind(wanted)):
        raise ValueError(
            f"inside jit, the mesh of the context is {_named(found)} and that of Zero is "
            f"{_named(wanted)}. Call the jitted function under jax.set_mesh(zero.mesh), or where "
            "no mesh is set."
        )


def _kind(mesh: AbstractMesh) -> tuple[Any, Any]:
    return tuple(mesh.shape.items()), mesh.axis_types


def _named(mesh: AbstractMesh) -> str:
    axes = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return "(" + ", ".join(f"{name}={size} {kind.name}" for (name, size), kind in axes) + ")"


def _only(spec: P, axes: Collection[str]) -> P:
    """A spec without the axes that are not among ``axes``."""
    kept = (tuple(name for name in _specs.axes_of(entry) if name in axes) for entry in spec)
    return _specs.trim([_specs.entry_of(names) for names in kept])
