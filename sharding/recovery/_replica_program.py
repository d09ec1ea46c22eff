"""The program that copies a state to host memory, here and at peers, alone or in a step."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding._types import Tree
from sharding.offload._host_memory import DEVICE, HOST, on_host
from sharding.recovery import _stored_leaf
from sharding.recovery._machines import Machines, is_compile_only

P = PartitionSpec
# Of one device's bytes: what a transfer carries at most, so that few are in flight at a time.
_FRACTION, _LEAST, _MOST = 32, 1 << 18, 64 << 20
_ON_TPUS = 2  # as small: programs for TPUs hold four to six of them, those for GPUs one or two


class Transfer(NamedTuple):
    leaves: tuple[int, ...]  # several small ones, flattened, one after the other; or a large one
    box: tuple[slice, ...] | None  # of the large one's block; None for all of it
    route: int  # where it goes, as an index into the routes of the program


class Replicas(NamedTuple):
    """What the program returns; arrays by device, in host memory where devices have it."""

    # On how many devices the snapshot before was committed; known once all copies are made.
    committed: Any
    sums: Any  # checksums of each device's blocks. uint32 [devices, leaves]
    sent_sums: Any  # by route and round, the same of the blocks that arrived
    own: Any  # by transfer, words of each device's own blocks. [devices, ...]
    sent: Any  # by transfer and round, words of the blocks that arrived. [devices, ...]


class ReplicaProgram:
    """Copies the shards of a state, given as paths and arrays, which may be abstract."""

    def __init__(self, mesh: Mesh, machines: Machines, leaves: Sequence[tuple[str, Any]]):
        self.mesh = mesh
        self.leaves: list[_stored_leaf.StoredLeaf] = []
        self.placements: list[_stored_leaf.BlockPlacement] = []
        known: dict[Any, _stored_leaf.BlockPlacement] = {}
        for path, x in leaves:
            _stored_leaf.check_on_mesh(path, x, mesh)
            dtype = _stored_leaf.stored_dtype(x.dtype, path)
            key = (x.sharding.spec, x.shape, dtype.itemsize)
            if key not in known:
                of_leaf = x.sharding, x.shape, dtype.itemsize
                known[key] = _stored_leaf.block_placement(*of_leaf, machines)
            self.placements.append(known[key])
            self.leaves.append(_stored_leaf.StoredLeaf(path, x.shape, dtype.name, known[key].grid))
        self._specs = [x.sharding.spec for _, x in leaves]
        self.routes = list(dict.fromkeys(placement.sends for placement in self.placements))
        self.transfers = list(self._split_into_transfers())
        # CPUs have no other memory.
        self.on_cpus = mesh.devices.flat[0].platform == "cpu"
        self._space = DEVICE if self.on_cpus else HOST
        self.jitted = jax.jit(self.trace)

    def __call__(self, leaves: Sequence[jax.Array], committed: bool) -> Replicas:
        return self.jitted(self.flags(committed), *leaves)

    def flags(self, committed: bool) -> Any:
        """Shows all devices whether this process committed the snapshot before: int32 [devices]."""
        sharding = NamedSharding(self.mesh, P(self.mesh.axis_names))
        shape = (self.mesh.size,)
        if is_compile_only(self.mesh):
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        flag = np.full(1, committed, np.int32)
        own = [jax.device_put(flag, device) for device in self.mesh.local_devices]
        return jax.make_array_from_single_device_arrays(shape, sharding, own)

    def _split_into_transfers(self) -> Iterator[Transfer]:
        """Splits large blocks into boxes, and bundles small ones of the same width and route."""
        bytes_per_device = sum(leaf.block_bytes for leaf in self.leaves)
        limit = min(max(bytes_per_device // _FRACTION, _LEAST), _MOST)
        if self.mesh.devices.flat[0].platform == "tpu":
            limit //= _ON_TPUS
        bundles: dict[tuple[int, int], list[int]] = {}
        for i, (leaf, placement) in enumerate(zip(self.leaves, self.placements, strict=True)):
            size = leaf.block_bytes
            route = self.routes.index(placement.sends)
            if size > limit:
                block = tuple(slice(0, n) for n in leaf.block_shape)
                for box in _boxes(block, -(-size // limit)):
                    yield Transfer((i,), box, route)
            elif size:
                key = (np.dtype(leaf.dtype).itemsize, route)
                if sum(self.leaves[j].block_bytes for j in bundles.get(key, ())) + size > limit:
                    yield Transfer(tuple(bundles.pop(key)), None, route)
                bundles.setdefault(key, []).append(i)
        for (_, route), members in bundles.items():
            yield Transfer(tuple(members), None, route)

    def trace(self, flags: jax.Array, *leaves: jax.Array) -> Replicas:
        """Copies leaves, as a function to be traced: one ``shard_map`` over all axes."""
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
        """Runs on each device: checksums, then transfer by transfer."""
        axes = self.mesh.axis_names
        place = lax.axis_index(axes)  # of this device in the mesh

        def block(x: jax.Array, i: int) -> jax.Array:
            return _own_part(_stored_leaf.as_words(x), self.placements[i], place)

        by_leaf = [
            _stored_leaf.checksum(block(shards[i], i)) if i in shards else jnp.uint32(0)
            for i in range(len(self.leaves))
        ]
        sums = jnp.stack(by_leaf)[None]  # [1, leaves]
        sent_sums = [[lax.ppermute(sums, axes, pairs) for pairs in route] for route in self.routes]
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
                words = blocks[0][transfer.box][None]  # [1, *box]
            else:
                words = jnp.concatenate([x.reshape(1, -1) for x in blocks], 1)  # [1, elements]
            arrived = [lax.ppermute(words, axes, pairs) for pairs in self.routes[transfer.route]]
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


class StepCopies:
    """Copies that a training step makes beside its own work, of a state that it may donate."""

    def __init__(
        self,
        program: ReplicaProgram,
        saved: Sequence[Any],  # the leaves of the snapshot
        taken: Sequence[Any],  # the leaves of the step's state
        committed: bool,  # whether this process committed the snapshot before
        started: Callable[[Replicas], None],  # is called with what the step copied
    ):
        places = {id(x): i for i, x in enumerate(taken)}
        self._program = program
        self._places = [places.get(id(x)) for x in saved]
        # Leaves of the snapshot that are none of the step's state are further arguments.
        others = [x for x, i in zip(saved, self._places, strict=True) if i is None]
        self.key = (id(program), tuple(self._places))  # distinguishes compiled steps
        self.arguments = program.flags(committed), others  # of the step, beside its own
        self.started = started

    def beside(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the step take ``arguments`` as its last one, and return the replicas, too."""
        # The last argument of ``step`` is a scalar that is known once the state is copied.

        def call(state: Tree, *args: Any) -> tuple[Any, Replicas]:
            *own, (flags, others) = args
            taken, untaken = jax.tree.leaves(state), iter(others)
            leaves = [next(untaken) if i is None else taken[i] for i in self._places]
            with jax.named_scope("snapshot"):
                replicas = self._program.trace(flags, *(_stored_leaf.as_data(x) for x in leaves))
                if self._program.on_cpus:
                    state = _after(replicas.committed, state)
            return step(state, *own, replicas.committed), replicas

        return call


def _own_part(
    block: jax.Array, placement: _stored_leaf.BlockPlacement, place: jax.Array
) -> jax.Array:
    if placement.dim < 0:
        return block
    size = block.shape[placement.dim] // placement.parts
    start = jnp.asarray(placement.part, jnp.int32)[place] * size
    return lax.dynamic_slice_in_dim(block, start, size, placement.dim)


def _boxes(box: tuple[slice, ...], count: int) -> Iterator[tuple[slice, ...]]:
    """Splits a box into ``count`` boxes or a few more, along its first dims."""
    # For slices of its last ones TPU programs would first change the layout of the entire array.
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


def _after(committed: jax.Array, state: Tree) -> Any:
    """A state that XLA knows once the copies are sent."""
    # CPU programs run the collectives of a loop beside others, each device in an order of its own,
    # until all threads wait. They drop barriers, so data must depend on what is sent.
    known = committed >= 0  # always
    return jax.tree.map(
        lambda x: x if on_host(x) else jnp.where(known, x, jnp.zeros_like(x)), state
    )
