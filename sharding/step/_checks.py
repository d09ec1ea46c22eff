"""Checks of the arguments of a step: an error that names the array, before jax's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from sharding._types import Array, Tree
from sharding.placement._specs import AnyMesh, KeyPath, explicit_axes, path_str
from sharding.sync import GradientSync


def has_placement(tree: Tree, shardings: Tree) -> bool:
    """Whether the real arrays of a tree have these shardings; None for any."""
    return shardings is None or all(jax.tree.leaves(jax.tree.map(_fits, tree, shardings)))


def _fits(leaf: Array, want: NamedSharding) -> bool:
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return True
    have = getattr(leaf, "sharding", None)
    fits = have is not None and have.is_equivalent_to(want, jnp.ndim(leaf))
    return fits and not _explicit(have) > _explicit(want)


def check_placed(tree: Tree, shardings: Tree) -> None:
    """Raises if a real array has another placement than a step requires."""

    def check(path: KeyPath, leaf: Array, want: NamedSharding) -> None:
        if not _fits(leaf, want):
            raise ValueError(
                f"{path_str(path)!r} has the placement "
                f"{getattr(leaf, 'sharding', type(leaf).__name__)}; the step requires "
                f"{want.spec} in {want.memory_kind} memory on the mesh {dict(want.mesh.shape)}: "
                "offload= of Zero says which memory has what. Make the state with zero.init, "
                "or place it with jax.device_put(state, zero.shardings(state)), parameters alone "
                "with zero.place(params)."
            )

    jax.tree.map_with_path(check, tree, shardings)


def check_replicated(model_state: Tree) -> None:
    for path, x in jax.tree.leaves_with_path(model_state):
        if isinstance(x, jax.Array) and not x.sharding.is_fully_replicated:
            raise ValueError(
                f"model state {path_str(path)!r} has the placement {x.sharding}; the step requires "
                "it replicated, as by zero.replicate. A second model stays sharded, as one of "
                "two: zero.value_and_grad(loss_fn, trainable=(True, False))((params, other), "
                "batch); eval_step(fn)(((params, other), None), batch) (docs: how_to/two_models)."
            )


def _explicit(sharding: Any) -> set[str]:
    """The Explicit axes of its mesh; jax takes no arrays of these where Zero has Auto ones."""
    if not isinstance(sharding, NamedSharding):
        return set()
    return set(explicit_axes(sharding.mesh))


def check_batch(batch: Tree, devices: int, microbatches: int) -> None:
    """Raises unless the batch has rows, as many in each array, that divide over the devices."""
    leaves = jax.tree.leaves_with_path(batch)
    if not leaves:
        raise ValueError(f"the batch is empty: it holds no arrays, only {batch!r}.")
    for key_path, x in leaves:
        check_numbers(key_path, x)
    arrays = [(path_str(path) or "batch", tuple(x.shape)) for path, x in leaves if np.ndim(x)]
    for path, shape in arrays:
        if not shape[0]:
            raise ValueError(f"the batch is empty: {path!r} has shape {shape}.")
        if shape[0] != arrays[0][1][0]:
            raise ValueError(
                f"batch arrays {arrays[0][0]!r} of shape {arrays[0][1]} and {path!r} of shape "
                f"{shape} differ in their first dim, which is sharded: it has to be the batch in "
                "each array. Pass arrays that every device needs in full as model_state, or close "
                "over them (docs: understand/meaning)."
            )
    if arrays and arrays[0][1][0] % (devices * microbatches):
        path, shape = arrays[0]
        raise ValueError(
            f"batch array {path!r} of shape {shape}: its first dim does not divide by "
            f"{devices} devices times {microbatches} micro-batches (docs: how_to/accumulate). "
            "shd.pad_rows fills up a last batch, and masks what it adds."
        )


def check_numbers(path: KeyPath, x: Array, keys: bool = True) -> None:
    """Raises unless a leaf of a batch holds numbers, or random keys where these are allowed."""
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        if keys:
            return
        remedy = (
            "which zero.put does not place. Leave it out, make the step with rngs=True or "
            "rngs='per_example', and call step(state, batch, key). Or put "
            "jax.random.key_data(keys) of all rows, for jax.random.wrap_key_data in the loss"
        )
    elif dtype.kind in "biufcV":  # V: bfloat16 and narrower
        return
    else:
        remedy = "which no device holds. Leave it out, or encode it as numbers"
    raise ValueError(f"batch array {path_str(path) or 'batch'!r} has dtype {dtype}, {remedy}.")


def check_compiled() -> None:
    """Raises under ``jax.disable_jit``: without compiling, nothing is sharded."""
    config: Any = jax.config
    if config.jax_disable_jit:
        raise ValueError(
            "ZeRO's steps do not run under jax.disable_jit(): what shards arrays is compiled. To "
            "debug a loss, call it by itself, loss_fn(params, batch), or print from it with "
            "jax.debug.print; to run the step all the same, wrap it in jax.disable_jit(False)."
        )


# The path of a leaf is made for the error alone.


def check_alive(state: Tree, **others: Tree) -> None:
    """Raises if an array of a state, or of named arguments, is deleted: jax may end the process."""
    for name, tree in {"state": state, **others}.items():
        for i, x in enumerate(jax.tree.leaves(tree)):
            real = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
            if not real or not x.is_deleted():
                continue
            path = path_str(jax.tree.leaves_with_path(tree)[i][0])
            which = f"{path!r} ({x.aval})" if path else f"{x.aval}"
            if name != "state":
                raise ValueError(
                    f"argument {name!r}: {which} was deleted, or donated to an earlier call of a "
                    "jitted function. Make it anew for each call."
                )
            raise ValueError(
                "the state was donated to an earlier call of a step, which reused its memory: "
                f"{which} is deleted. Go on with the state that the step returned: `state, metrics "
                "= step(state, batch)`. Where that is lost, make the state anew with zero.init, or "
                "restore a checkpoint; zero.train_step(..., donate=False) leaves the old state "
                "usable."
            )


def check_apart(donated: Tree, others: Tree, buffers: bool) -> None:
    """Raises if a donated array is passed twice, or with ``buffers`` its memory: jax may abort."""
    first: dict[int, int] = {}
    count = len(jax.tree.leaves(donated))
    for i, x in enumerate(jax.tree.leaves((donated, others))):
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            continue
        key = _memory_of(x) if buffers else id(x)
        if first.setdefault(key, i) < min(i, count):
            paths = jax.tree.leaves_with_path((donated, others))
            one, two = (path_str(paths[j][0]).partition("/")[2] for j in (first[key], i))
            raise ValueError(
                f"{one!r} of the state and {two!r} of the call are one array in memory, and the "
                "step donates the first. Copy one of them: jnp.copy(x), or zero.replicate(x) "
                "for a model state; or make the step with donate=False."
            )


def _memory_of(x: jax.Array) -> int:
    """What is equal for arrays that share memory, where a CPU's address tells."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or not x.size or not x.addressable_shards:
        return id(x)
    shard = x.addressable_shards[0]
    return shard.data.unsafe_buffer_pointer() if shard.device.platform == "cpu" else id(x)


def check_not_streamed(zero: Any) -> None:
    if zero.offload == "all":
        raise ValueError(
            "offload='all' leaves stacked parameters in host memory, and of what updates them "
            "nothing else takes these than train_step(update='backward'), which streams them. Make "
            "the step with update='backward', or Zero with offload='optimizer' (docs: "
            "how_to/offload)."
        )


def check_all_rows(zero: Any, loss: Any) -> None:
    if loss.per_device and zero.num_devices > 1:
        raise ValueError(
            "per_device=True was asked of a loss that update='backward' or offload='all' runs: "
            "these give it all rows, since no device runs it by itself. Leave per_device out."
        )


def check_whole_number(name: str, value: Any, least: int) -> None:
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_number:
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    if value < least:
        rule = f"be at least {least}" if least else "not be negative"
        raise ValueError(f"{name} must {rule}, got {value}.")


def check_makes(name: str, make: Any, of_existing: str) -> None:
    """Raises unless ``make`` is a function, rather than what it should make."""
    arrays = [x for x in jax.tree.leaves(make) if isinstance(x, jax.Array | np.ndarray)]
    if not callable(make) or (arrays and not isinstance(make, jax.tree_util.Partial)):
        raise ValueError(
            f"zero.{name} takes a function, by which each device makes its shard, and its "
            f"arguments; got a {type(make).__name__}. Call zero.{name}(make, ...), not "
            f"zero.{name}(make(...)); {of_existing} (docs: start/your_script)."
        )


def check_options(zero: Any) -> None:
    if not isinstance(zero.mesh, AnyMesh):
        raise ValueError(
            f"Zero takes a mesh, got {zero.mesh!r}. Make one of all devices by "
            "jax.make_mesh((jax.device_count(),), ('data',)) (docs: how_to/mesh)."
        )
    if zero.stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {zero.stage!r}.")
    if not zero._layout.axes:
        raise ValueError("axis must name at least one mesh axis, got none.")
    named = zero._layout.axes + zero._layout.replica_axes
    for axis in named:
        if axis not in zero.mesh.axis_names:
            raise ValueError(
                f"axis {axis!r} is not in the mesh {zero.mesh.axis_names}: name axes of the "
                "mesh in Zero(mesh, axis=...), 'data' by default, and replica_axis."
            )
        if named.count(axis) > 1:
            raise ValueError(
                f"axis {axis!r} is named twice: axis={zero.axis!r}, "
                f"replica_axis={zero.replica_axis!r}. A mesh axis shards or replicates, once."
            )
    if zero.shard_state_over_replicas and not (zero._layout.replica_axes and zero.stage):
        raise ValueError(
            "shard_state_over_replicas needs a replica_axis and stage 1, 2 or 3, got "
            f"replica_axis={zero.replica_axis!r} and stage {zero.stage}."
        )
    if zero.offload not in (None, "optimizer", "all"):
        raise ValueError(f"offload must be 'optimizer', 'all' or None, got {zero.offload!r}.")
    if zero.update_on not in ("device", "host"):
        raise ValueError(f"update_on must be 'device' or 'host', got {zero.update_on!r}.")
    if zero.offload == "all" and zero.update_on == "host":
        raise ValueError(
            "offload='all' streams layers through the devices, which update them in the backward "
            "pass, and update_on='host' leaves the update to the CPU. Leave out one of them."
        )
    if zero.view not in ("device", "global", None):
        raise ValueError(f"view must be 'device', 'global' or None, got {zero.view!r}.")
    if zero.sync is not None and not isinstance(zero.sync, GradientSync):
        raise ValueError(f"sync must be a GradientSync or None, got {zero.sync!r}.")
    if zero.precision.gather is not None and zero.stage < 3:
        raise ValueError(
            f"precision.gather={zero.precision.gather} is for stage 3, where a step gathers "
            f"parameters for the loss; at stage {zero.stage} they are replicated between steps."
        )
    for name in ("min_shard_size", "offload_min_size"):
        check_whole_number(name, getattr(zero, name), 0)
