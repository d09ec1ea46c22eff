"""How a ZeRO stage uses a mesh: the axes it shards over, and the placement of parameters."""

import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding._types import Array, Tree
from sharding.placement import _specs
from sharding.placement._specs import AnyMesh, Axis

# By the planner's links a gather over the n H100s of a node takes n x 3.8 us of hops, then sends
# 345 GB/s: with shards of 9 x 3.8 us x 345 GB/s n / (n - 1) it reaches 90 % of that.
GATHER_SHARD_BYTES = 13 * 2**20
# At most so many layers of a stack are gathered at once, each by itself.
GATHERED_LAYERS = 8
# Shards of the last dim are multiples of this many elements, or another dim is preferred: blocks of
# quantized state stay unsplit, and so do a TPU's registers (its compiler takes three times as long
# over narrower shards).
_LAST_DIM_MULTIPLE = 256
# A dim has to have this many elements to be sharded in place of the last one; a shorter one may be
# the dim of a stack of layers, which loops take off.
_MIN_OTHER_DIM = 64


class Placement(NamedTuple):
    """The placement of parameters; trees as the parameters."""

    params: Tree  # specs between steps
    shards: Tree  # specs of the reduced gradients, and of the parameters while they are updated
    dims: Tree  # the sharded dim, counted from the end; 0 for an unsharded parameter
    reasons: Tree  # why a parameter is unsharded; empty for a sharded one


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, a ZeRO stage, and how both shard parameters and batches; fields as of ``Zero``."""

    mesh: AnyMesh
    stage: int
    axis: Axis
    replica_axis: Axis | None = None
    shard_state_over_replicas: bool = False
    min_shard_size: int = 0
    unsharded: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    per_device: bool = False  # whether devices run a loss, each of its own rows
    update_on: str = "device"
    # In a trace on an Auto twin of the mesh: those that are not Auto on it.
    traced_axes: tuple[str, ...] = ()

    # --- Axes ---------------------------------------------------------------------------------

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard parameters and state."""
        return _specs.axes_of(self.axis)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        return _specs.axes_of(self.replica_axis)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that shard the batch, in the order of the mesh."""
        both = self.axes + self.replica_axes
        return tuple(name for name in self.mesh.axis_names if name in both)

    @property
    def other_axes(self) -> frozenset[str]:
        """The user's axes of the mesh, such as those of tensor parallelism."""
        return frozenset(self.mesh.axis_names) - set(self.data_axes)

    @property
    def explicit_axes(self) -> tuple[str, ...]:
        """The axes whose shardings are part of the types."""
        return _specs.explicit_axes(self.mesh)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes that are Explicit for a partitioned loss."""
        return self.explicit_axes or self.traced_axes

    @property
    def recomputes(self) -> bool:
        """Whether layers that gather their parameters do so again in the backward pass."""
        return self.stage == 3 and self.reshard_after_forward

    @property
    def num_shards(self) -> int:
        return _specs.num_shards(self.mesh, P(self.axis))

    @property
    def num_replicas(self) -> int:
        return _specs.num_shards(self.mesh, P(self.replica_axis))

    @property
    def num_devices(self) -> int:
        """The number of data-parallel devices."""
        return self.num_shards * self.num_replicas

    @property
    def gather_group_bytes(self) -> int:
        """The bytes of a group of parameters that are gathered at once after an update.

        All on CPUs: their compiler holds no more for it, and stacks in loops would be copied.
        """
        return 2**62 if self.platform == "cpu" else GATHER_SHARD_BYTES * self.num_shards

    @property
    def platform(self) -> str:
        """The platform of the devices, such as ``tpu``; ``unknown`` for an abstract mesh."""
        devices = self.mesh.devices.flat if isinstance(self.mesh, Mesh) else [None]
        return getattr(devices[0], "platform", "unknown")

    @property
    def is_one_host_of_tpus(self) -> bool:
        """Whether the mesh is a torus of two dims, with up to 8 chips."""
        if self.platform != "tpu" or self.mesh.size > 8:
            return False
        return "lite" in self.mesh.devices.flat[0].device_kind

    # --- Parameters ---------------------------------------------------------------------------

    def place(self, params: Tree, param_specs: Tree = None) -> Placement:
        """The placement of parameters; specs are the argument, else theirs, else Flax metadata."""
        leaves, treedef = jax.tree.flatten_with_path(params)
        if param_specs is None:
            known = [_specs.sharding_on(x, self.mesh) for _, x in leaves]
            # Abstract arrays of arguments on a mesh are replicated: that is no request.
            requested = any(s and (isinstance(s.mesh, Mesh) or any(s.spec)) for s in known)
            if requested and None not in known:
                param_specs = treedef.unflatten([s.spec for s in known if s])
        specs = treedef.flatten_up_to(_specs.resolve_param_specs(params, param_specs, self.mesh))
        pairs = zip(leaves, specs, strict=True)
        placed = [self._place_leaf(_specs.path_str(path), x, spec) for (path, x), spec in pairs]
        return Placement(*(treedef.unflatten([fields[i] for fields in placed]) for i in range(4)))

    def _place_leaf(self, path: str, leaf: Array, spec: P) -> tuple[P, P, int, str]:
        """The fields of ``Placement`` for one parameter."""
        ndim = len(leaf.shape)
        entries = [self._sharding_axes(_specs.axes_of(e)) for e in _specs.by_dim(spec, ndim)]
        on_data = [d for d, axes in enumerate(entries) if set(axes) & set(self.data_axes)]
        if self.stage < 3:
            on_data = []  # parameters are replicated, whatever their names say
        if len(on_data) > 1 or (on_data and entries[on_data[0]] != self._sharding_axes(self.axes)):
            raise ValueError(
                f"parameter {path!r} has the spec {spec}; of the data axes only {self.axis!r} can "
                "shard a parameter, along one dim that no other axis shards."
            )
        if any(set(_specs.axes_of(entry)) & set(self.data_axes) for entry in spec):
            spec = self.other_spec(spec)
        dim = next(iter(on_data), None)
        reason = ""
        if self.stage and not on_data:
            dim, reason = self._shard_dim(path, leaf, spec)
        if dim is None:
            return spec, spec, 0, reason
        sharded = shards = _specs.with_axis(spec, ndim, dim, self.axis)
        if self.shard_state_over_replicas and leaf.shape[dim] % self.num_devices == 0:
            shards = _specs.with_axis(spec, ndim, dim, self.axes + self.replica_axes)
        return sharded if self.stage == 3 else spec, shards, dim - ndim, ""

    def _shard_dim(self, path: str, leaf: Array, spec: P) -> tuple[int | None, str]:
        """The dim of a parameter to shard; else None, and the reason that ``describe`` shows."""
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return None, f"unsharded: {leaf.dtype} is not a number"
        pattern = next((p for p in self.unsharded if re.search(p, path)), None)
        if pattern is not None:
            return None, f"unsharded: requested by unsharded={pattern!r}"
        shape = tuple(leaf.shape)
        size = math.prod(leaf.shape)
        if size < max(self.min_shard_size, 1):
            return None, f"unsharded: {size} elements, min_shard_size is {self.min_shard_size}"
        free = [d for d in range(len(shape)) if d >= len(spec) or spec[d] is None]
        counts = [self.num_shards]
        if self.shard_state_over_replicas:
            counts.insert(0, self.num_devices)
        dim = choose_sharded_dim(shape, free, counts)
        none = f"unsharded: no free dim of {shape} divides by {self.num_shards}"
        return dim, none if dim is None else ""

    def _sharding_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Without those of one device, which shard nothing."""
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def shard_spec(self, leaf: Array) -> P:
        """The spec of the shards of an array that is no parameter, by its shape."""
        return self._place_leaf("", leaf, P())[1]

    # --- Specs --------------------------------------------------------------------------------

    def manual_spec(self, spec: P) -> P:
        """A spec without the user's axes, for a ``shard_map`` over the data axes."""
        return _specs.only_axes(spec, self.data_axes)

    def other_spec(self, spec: P) -> P:
        """A spec of the user's axes alone."""
        return _specs.only_axes(spec, self.other_axes)

    def block_shape(self, shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
        """The shape of the block of an array that a device has on the user's axes."""
        return NamedSharding(self.mesh, self.other_spec(spec)).shard_shape(shape)

    def keep_axes(self, spec: P, axes: Collection[str]) -> P:
        """A spec without the data axes that are not among ``axes``."""
        return _specs.only_axes(spec, self.other_axes | set(axes))

    def shardings(self, specs: Tree) -> Tree:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_specs.is_spec
        )

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    def constrain(self, tree: Tree, specs: Tree) -> Tree:
        """Constrains the partitioner to these specs; for use inside ``on_mesh``."""
        if not self.explicit_axes:
            specs = self.shardings(specs)
        return jax.lax.with_sharding_constraint(tree, specs)

    # --- Batches and other arguments ----------------------------------------------------------

    def batch_specs(self, tree: Tree) -> Tree:
        """Arrays are sharded along the first dim, scalars replicated."""
        entry = _specs.entry_of(self.data_axes)
        return jax.tree.map(lambda x: P(entry) if np.ndim(x) else P(), tree)

    def batch_shardings(self, tree: Tree) -> Tree:
        return self.shardings(self.batch_specs(tree))

    def output_shardings(self, tree: Tree) -> Tree:
        """Of what a loss or metric returns, beside rows perhaps arrays of another first dim."""
        rows = lambda x: not np.ndim(x) or x.shape[0] % self.num_devices == 0  # noqa: E731
        return jax.tree.map(lambda x: self.batch_shardings(x) if rows(x) else self.replicated, tree)

    def place_batch(self, batch: Tree) -> Tree:
        """Moves the arrays of a batch that are committed to another placement.

        Abstract ones without a placement get it, so that they lower the program of a real call.
        """

        def place(x: Array, want: NamedSharding) -> Any:
            x = _abstract_on(x, want)
            if jax.process_count() > 1 and _is_local(x) and not want.is_fully_addressable:
                raise ValueError(
                    f"a step over several processes got a batch array of this process, of shape "
                    f"{x.shape}: place the rows of each process with zero.put(batch) "
                    "(docs: how_to/clusters)."
                )
            if not _is_committed(x) or x.sharding.is_equivalent_to(want, x.ndim):
                return x
            return jax.device_put(x, want)

        return jax.tree.map(place, batch, self.batch_shardings(batch))

    def replicate_foreign(self, args: Tree) -> Tree:
        """Replicates the arrays among arguments that are committed to devices outside the mesh."""
        if not isinstance(self.mesh, Mesh):
            return args
        devices = set(self.mesh.devices.flat)

        def place(x: Array) -> Any:
            inside = not _is_committed(x) or x.sharding.device_set == devices
            return x if inside else jax.device_put(x, self.replicated)

        return jax.tree.map(place, args)

    def replicate_new(self, model_state: Tree) -> Tree:
        """Replicates arrays on no mesh: a step compiles once for them and those it returns."""
        if not isinstance(self.mesh, Mesh):
            return model_state
        devices = set(self.mesh.devices.flat)

        def place(x: Array) -> Any:
            if not isinstance(x, jax.Array | np.ndarray) or isinstance(x, jax.core.Tracer):
                return _abstract_on(x, self.replicated)
            sharding = getattr(x, "sharding", None)
            inside = isinstance(sharding, NamedSharding) and sharding.device_set == devices
            return x if inside else jax.device_put(x, self.replicated)

        return jax.tree.map(place, model_state)

    def place_scalars(self, state: Tree) -> Tree:
        """Replicates the scalars of a state that are set between steps, such as a learning rate."""
        if not isinstance(self.mesh, Mesh):
            return state
        devices = set(self.mesh.devices.flat)

        def place(x: Array) -> Any:
            real = isinstance(x, jax.Array | np.ndarray | np.generic | float | int)
            if not real or np.ndim(x) or isinstance(x, jax.core.Tracer):
                return x
            if isinstance(x, jax.Array):
                if x.sharding.device_set == devices:
                    return x
                if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                    return jax.device_put(x, self.replicated)
            # In memory of its own, as a step donates it, and not weakly typed: no new program.
            return jax.device_put(np.array(x), self.replicated)

        return jax.tree.map(place, state)

    def copy(self, tree: Tree, shardings: Tree) -> Tree:
        """Moves arrays to the mesh, into memory of their own; types get the shardings.

        ``device_put`` may share memory with what it got. A step that gets both and donates one
        would end the process.
        """
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
            placed = jax.tree.broadcast(shardings, tree)
            return jax.tree.map(lambda x, to: x.update(sharding=to), tree, placed)
        moved = jax.device_put(tree, shardings)
        return jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=shardings)(moved)


def choose_sharded_dim(
    shape: Sequence[int], free: Sequence[int], shard_counts: Sequence[int]
) -> int | None:
    """The longest of the free dims that divides by the first count that any does; else None.

    If that is the last dim, and its shards would not be multiples of 256 elements, the longest
    other dim of at least 64 elements that divides is chosen instead, if there is one.
    """

    def length(dim: int) -> tuple[int, int]:
        return shape[dim], -dim

    last = len(shape) - 1
    for count in shard_counts:
        divisible = [dim for dim in free if shape[dim] and shape[dim] % count == 0]
        if not divisible:
            continue
        best = max(divisible, key=length)
        if best == last and shape[last] // count % _LAST_DIM_MULTIPLE:
            others = [d for d in divisible if d != last and shape[d] >= _MIN_OTHER_DIM]
            best = max(others, key=length, default=last)
        return best
    return None


def _is_local(x: Array) -> bool:
    """Whether an array, such as a NumPy array, is of this process alone; scalars are not asked."""
    real = isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)
    return real and x.ndim > 0 and getattr(x, "is_fully_addressable", True)


def _abstract_on(x: Any, sharding: NamedSharding) -> Any:
    """An abstract array without a placement, with this one; anything else as it is."""
    if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return x


def _is_committed(x: Array) -> bool:
    """Whether a real array was put on its devices explicitly."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed
