"""The program that copies a state to host memory, here and on the machines of peers."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.offload._host_memory import DEVICE, HOST, on_host
from sharding.recovery._machines import Machines, is_compile_only
from sharding.recovery._peer_placement import Holders
from sharding.recovery._stored_leaf import (
    BlockPlacement,
    StoredLeaf,
    block_placement,
)
from sharding.recovery._words import as_words, checksum, stored_dtype

P = PartitionSpec
# Of one device's bytes: what a transfer carries at most, so that few are in flight at a time.
_FRACTION, _LEAST, _MOST = 32, 1 << 18, 64 << 20
_ON_TPUS = 2  # as small: programs for TPUs hold four to six of them, those for GPUs one or two


class Transfer(NamedTuple):
    """What crosses a link at once.

    Attributes:
      leaves: several small ones, flattened, one after the other; or a large one.
      box: of the large one's block; None for all of it.
      route: where it goes, as an index into the routes of the program.
    """

    leaves: tuple[int, ...]
    box: tuple[slice, ...] | None
    route: int


class Replicas(NamedTuple):
    """What the program returns; arrays by device, in host memory where devices have it.

    Attributes:
      committed: on how many devices the snapshot before was committed; known when all copies are
        made. int32 []
      sums: checksums of each device's blocks. uint32 [devices, leaves]
      sent_sums: by route and round, the same of the blocks that arrived.
      own: by transfer, words of each device's own blocks. [devices, ...]
      sent: by transfer and round, words of the blocks that arrived. [devices, ...]
    """

    committed: Any
    sums: Any
    sent_sums: Any
    own: Any
    sent: Any


class ReplicaProgram:
    """Copies the shards of a state; compiled once.

    Args:
      mesh: the devices.
      machines: of the mesh.
      holders: the machines that keep each machine's shards.
      leaves: paths and arrays of the state, which may be abstract.

    Raises:
      TypeError: for a leaf that is not an array on the mesh, or of a dtype that cannot be stored.
    """

    def __init__(
        self, mesh: Mesh, machines: Machines, holders: Holders, leaves: Sequence[tuple[str, Any]]
    ):
        self.mesh = mesh
        self.leaves: list[StoredLeaf] = []
        self.placements: list[BlockPlacement] = []
        found: dict[Any, BlockPlacement] = {}
        for path, x in leaves:
            check_on_mesh(path, x, mesh)
            dtype = stored_dtype(x.dtype, path)
            key = (x.sharding.spec, x.shape, dtype.itemsize)
            if key not in found:
                found[key] = block_placement(x.sharding, x.shape, dtype.itemsize, machines, holders)
            self.placements.append(found[key])
            self.leaves.append(StoredLeaf(path, x.shape, dtype.name, found[key].grid))
        self._specs = [x.sharding.spec for _, x in leaves]
        self.routes = list(dict.fromkeys(placement.sends for placement in self.placements))
        self.transfers = list(self._plan_transfers())
        # CPUs have no other memory.
        self.on_cpus = mesh.devices.flat[0].platform == "cpu"
        self._space = DEVICE if self.on_cpus else HOST
        self.jitted = jax.jit(self.trace)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one device's blocks."""
        return sum(leaf.block_bytes for leaf in self.leaves)

    def __call__(self, leaves: Sequence[jax.Array], committed: bool) -> Replicas:
        """Dispatches the program; a collective.

        Args:
          leaves: of the state.
          committed: whether this process committed the snapshot before.
        """
        return self.jitted(self.flags(committed), *leaves)

    def flags(self, committed: bool) -> Any:
        """Of each device, whether its process committed the snapshot before: int32 [devices]."""
        sharding, shape = NamedSharding(self.mesh, P(self.mesh.axis_names)), (self.mesh.size,)
        if is_compile_only(self.mesh):
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        mine = [
            jax.device_put(np.full(1, committed, np.int32), device)
            for device in self.mesh.local_devices
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, mine)

    def _plan_transfers(self) -> Iterator[Transfer]:
        """Large blocks in boxes, small ones bundled with others of the same width and route."""
        limit = min(max(self.bytes_per_device // _FRACTION, _LEAST), _MOST)
        if self.mesh.devices.flat[0].platform == "tpu":
            limit //= _ON_TPUS
        bundles: dict[tuple[int, int], list[int]] = {}
        sizes: dict[tuple[int, int], int] = {}
        for i, (leaf, placement) in enumerate(zip(self.leaves, self.placements, strict=True)):
            size, route = leaf.block_bytes, self.routes.index(placement.sends)
            if size > limit:
                whole = tuple(slice(0, n) for n in leaf.block_shape)
                for box in _boxes(whole, -(-size // limit)):
                    yield Transfer((i,), box, route)
            elif size:
                key = (np.dtype(leaf.dtype).itemsize, route)
                if sizes.get(key, 0) + size > limit:
                    yield Transfer(tuple(bundles.pop(key)), None, route)
                    sizes[key] = 0
                bundles.setdefault(key, []).append(i)
                sizes[key] = sizes.get(key, 0) + size
        for (_, route), members in bundles.items():
            yield Transfer(tuple(members), None, route)

    def trace(self, flags: jax.Array, *leaves: jax.Array) -> Replicas:
        """The program, as a function to be traced: one ``shard_map`` over all axes."""
        axes = P(self.mesh.axis_names)
        # Not the empty ones: programs of jax 0.11 may not have inputs that nothing uses.
        used = {i: x for i, x in enumerate(leaves) if x.size}
        return jax.shard_map(
            self._on_device,
            mesh=self.mesh,
            in_specs=(axes, {i: self._specs[i] for i in used}),
            out_specs=Replicas(P(), axes, axes, axes, axes),
            check_vma=False,
        )(flags, {i: jax.device_put(x, DEVICE) if on_host(x) else x for i, x in used.items()})

    def _on_device(self, flags: jax.Array, shards: dict[int, jax.Array]) -> Replicas:
        """One device's work: checksums, then transfer by transfer."""
        axes = self.mesh.axis_names
        place = jax.lax.axis_index(axes)

        def block(x: jax.Array, i: int) -> jax.Array:
            return _own_part(as_words(x), self.placements[i], place)

        sums = jnp.stack(
            [
                checksum(block(shards[i], i)) if i in shards else jnp.uint32(0)
                for i in range(len(self.leaves))
            ]
        )[None]
        sent_sums = [[lax.ppermute(sums, axes, one) for one in route] for route in self.routes]
        sums, sent_sums = jax.device_put((sums, sent_sums), self._space)
        own: list[jax.Array] = []
        sent: list[list[jax.Array]] = []
        for transfer in self.transfers:
            # The next transfer reads the state when the one before is in host memory: else XLA
            # starts all of them, and holds what they carry.
            inputs = [shards[i] for i in transfer.leaves]
            if own:
                inputs, own[-1], sent[-1] = lax.optimization_barrier((inputs, own[-1], sent[-1]))
            else:  # nor does it store words that both a checksum and a transfer use
                inputs, sums = lax.optimization_barrier((inputs, sums))
            blocks = [block(x, i) for x, i in zip(inputs, transfer.leaves, strict=True)]
            if transfer.box is not None:
                words = blocks[0][transfer.box][None]
            else:
                words = jnp.concatenate([one.reshape(1, -1) for one in blocks], 1)
            arrived = [lax.ppermute(words, axes, one) for one in self.routes[transfer.route]]
            words, arrived = jax.device_put((words, arrived), self._space)
            own.append(words)
            sent.append(arrived)
        # Known once the state is read: what overwrites it can wait for that.
        flags, *_ = lax.optimization_barrier((flags, sums, sent_sums, own[-1:], sent[-1:]))
        if self.on_cpus:  # which drop barriers: adds zeros that XLA does not know
            for x in jax.tree.leaves((sent_sums, sent)):
                first = lax.population_count(x.reshape(-1)[:1])
                flags = flags + (first.astype(jnp.int32) >> 8)
        return Replicas(lax.psum(flags[0], axes), sums, sent_sums, own, sent)


def leaf_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths."""
    flat, _ = jax.tree.flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat]


def is_key(x: Any) -> bool:
    """Whether a leaf consists of random keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_data(x: Any) -> Any:
    """A leaf whose random keys are integers; other leaves as they are."""
    return jax.random.key_data(x) if is_key(x) and isinstance(x, jax.Array) else data_type(x)


def data_type(x: Any) -> Any:
    """``as_data`` that computes nothing: of random keys the type of their integers."""
    if not is_key(x):
        return x
    data = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def check_on_mesh(path: str, x: Any, mesh: Mesh) -> None:
    """Raises TypeError unless a leaf can be stored, and is on the devices of the mesh in order."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"{path} is {type(x).__name__} without a sharding on the mesh: PeerCheckpoints stores "
            "arrays with a NamedSharding, as zero.init returns them; other values belong to extra."
        )
    same = sharding.mesh.axis_names == mesh.axis_names and sharding.mesh.size == mesh.size
    if not same or list(sharding.mesh.devices.flat) != list(mesh.devices.flat):
        raise TypeError(f"{path} is on the mesh {sharding.mesh}, not on {mesh}.")
    if not is_key(x):
        stored_dtype(x.dtype, path)


def _own_part(block: jax.Array, placement: BlockPlacement, place: jax.Array) -> jax.Array:
    """The part of a shard that a device stores."""
    if placement.dim < 0:
        return block
    size = block.shape[placement.dim] // placement.parts
    start = jnp.asarray(placement.part, jnp.int32)[place] * size
    return lax.dynamic_slice_in_dim(block, start, size, placement.dim)


def _boxes(box: tuple[slice, ...], count: int) -> Iterator[tuple[slice, ...]]:
    """A box in ``count`` boxes or a few more, along its first dims.

    For slices of its last ones TPU programs would first change the layout of the entire array.
    """
    sizes = [s.stop - s.start for s in box]
    if count <= 1 or max(sizes, default=1) <= 1:
        yield box
        return
    dim = next(d for d, size in enumerate(sizes) if size > 1)
    num = min(count, sizes[dim])
    edges = [box[dim].start + sizes[dim] * i // num for i in range(num + 1)]
    for start, stop in itertools.pairwise(edges):
        inner = (*box[:dim], slice(start, stop), *box[dim + 1 :])
        yield from _boxes(inner, -(-count // num)) if num < count else (inner,)
