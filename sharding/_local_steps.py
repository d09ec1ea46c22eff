"""Local steps: replicas train by themselves, and meet every so many steps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_ext import LowPrecisionState, MasterWeightsState, Quantized
from sharding._types import Batch, Tree
from sharding._zero import Zero
from sharding.collectives._sum_dtype import sum_dtype, to_sum_dtype
from sharding.loss._loss_options import AnyLoss
from sharding.placement._specs import AnyMesh, axes_of, first_names, is_spec
from sharding.placement._state_specs import state_specs
from sharding.placement._train_state import (
    opt_state_of,
    params_of,
    resolve_trainable,
    with_opt_state,
    with_params,
)
from sharding.sync._dense import dense
from sharding.sync._interface import SyncedState, named_leaves, resize


class LocalState(NamedTuple):
    """What ``LocalSteps`` trains.

    Attributes:
      replicas: the train state of each replica that this process has devices of, on its own mesh.
      anchor: the trained parameters as last synchronized, in groups; on the mesh of all replicas.
      outer: the state of the outer transformation, for each group.
      sync: the state of the gradient sync, for each group; leaves (devices, ...).
      num_steps: how many there were.
    """

    replicas: tuple[Any, ...]
    anchor: tuple[list[jax.Array], ...]
    outer: tuple[Any, ...]
    sync: tuple[Any, ...]
    num_steps: int


class LocalSteps:
    r"""Local SGD and DiLoCo: each replica takes ``every`` steps by itself, then all are averaged.

    With :math:`\theta` the parameters on which replicas last agreed, and :math:`\theta_r` those of
    replica r after its H local steps with any inner transformation, the outer one treats what they
    moved as a gradient:

    .. math::

      \Delta = \frac 1R \sum_r (\theta - \theta_r), \qquad
      \theta \leftarrow \theta + \operatorname{outer}(\Delta), \qquad
      \theta_r \leftarrow \theta \quad \text{for all } r

    An outer SGD of rate 1 is local SGD; started from a trained state (``start``) it is post-local
    SGD; Nesterov momentum is DiLoCo. With H = 1, an inner SGD and an outer one of rate 1 it is the
    ordinary step. Inner states stay with their replicas. Within a replica ``Zero`` shards as ever.

    Wire bytes between replicas: per step 1 / H of an all-reduce of the shards that a device holds,
    2 (R - 1) / R times their bytes in float32, or those of the method of ``Zero(sync=...)``. It is
    planned by ``sharding.plan.estimate(local_steps=H)``.

    Args:
      zero: a ``Zero`` with one ``replica_axis``, whose replicas take local steps. Its ``sync`` is
        how they are averaged: None sums in float32 at least.
      outer: the outer transformation; by default SGD with rate 0.7 and Nesterov momentum 0.9, as in
        the paper.
      every: H, the steps between two synchronizations of a parameter.
      groups: into how many groups of about equal bytes the parameters are split. Each is
        synchronized every H steps, but not in the same step: the peak of the wire is lower.
      trainable: which parameters are trained, as of ``Zero.train_step``, which gets it. The others
        are equal in all replicas: they are not sent, and have no anchor and no outer state.

    Attributes:
      zeros: the ``Zero`` of each replica that this process has devices of.

    Raises:
      ValueError: without a single ``replica_axis``; with ``shard_state_over_replicas``; if
        ``every`` or ``groups`` is below 1, or ``groups`` above ``every``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sharding as shd
      >>> zero = shd.Zero(jax.make_mesh((2, 4), ("slice", "data")), replica_axis="slice")
      >>> local, tx = shd.LocalSteps(zero, every=2), optax.adam(1e-2)
      >>> params = {"w": jnp.ones((64, 64))}
      >>> state = local.init(lambda: (params, tx.init(params)), tx=tx)
      >>> step = local.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx=tx)
      >>> for _ in range(4):
      ...     state, metrics = step(state, local.put(jnp.ones((16, 64))))
      >>> params, opt_state = local.merged(state)

    References:
      Stich: Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv 1805.09767. Lin et
      al.: Don't Use Large Mini-Batches, Use Local SGD (post-local SGD), ICLR 2020, arXiv
      1808.07217. Douillard et al.: DiLoCo, 2023, arXiv 2311.08105; Streaming DiLoCo, 2025, arXiv
      2501.18512.
    """

    def __init__(
        self,
        zero: Zero,
        outer: optax.GradientTransformation | None = None,
        *,
        every: int = 64,
        groups: int = 1,
        trainable: Tree = None,
    ):
        axes = axes_of(zero.replica_axis)
        if len(axes) != 1 or zero.shard_state_over_replicas:
            raise ValueError(
                "LocalSteps needs a Zero with one replica_axis, whose replicas hold whole states, "
                f"got replica_axis={zero.replica_axis!r} and "
                f"shard_state_over_replicas={zero.shard_state_over_replicas}."
            )
        if not 1 <= groups <= every:
            raise ValueError(
                "groups must be at least 1 and at most every, the steps between two "
                f"synchronizations, got groups={groups} and every={every}."
            )
        self.zero, self.every, self.groups = zero, every, groups
        self.trainable = trainable
        self._method = zero.sync or dense()
        self._programs: dict[tuple[int, bool], Any] = {}  # by group, and whether it is donated
        self.outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
        self._axis, mesh = axes[0], zero.mesh
        self._others = tuple(name for name in mesh.axis_names if name != self._axis)
        devices = np.moveaxis(mesh.devices, mesh.axis_names.index(self._axis), 0)
        auto = (AxisType.Auto,) * devices.ndim
        self._mesh = Mesh(devices, (self._axis, *self._others), axis_types=auto)
        self._numbers = [i for i, of in enumerate(devices) if _is_own(of)]
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        types = tuple(kinds[name] for name in self._others)
        meshes = [Mesh(devices[i], self._others, axis_types=types) for i in self._numbers]
        one: Any = {"replica_axis": None, "sync": None}
        self.zeros = tuple(dataclasses.replace(zero, mesh=each, **one) for each in meshes)

    # --- The state ----------------------------------------------------------------------------

    def init(self, make_state: Callable[..., Any], *args: Any, **options: Any) -> LocalState:
        """Replicas with equal states; arguments are those of ``Zero.init``."""
        return self._started([zero.init(make_state, *args, **options) for zero in self.zeros])

    def start(self, state: Tree, previous: LocalState | None = None) -> LocalState:
        """Local steps from an ordinary train state of ``zero``, which stays as it is.

        Args:
          state: a train state of ``zero``, such as of ordinary steps before, or of ``merged``.
          previous: a local state, also of another number of replicas, whose outer state, residuals
            of the sync and number of steps go on. Do not use it afterwards.

        Raises:
          ValueError: if the state is not placed by ``zero``, or the previous one has other groups.
        """
        if isinstance(opt_state := opt_state_of(state), SyncedState):
            state = with_opt_state(state, opt_state.inner_state)
        for path, x in named_leaves(state)[0]:
            if not _is_on(x, self.zero.mesh):
                raise ValueError(
                    f"start takes a state placed by the Zero of LocalSteps, and {path!r} is not on "
                    f"the devices of its mesh {dict(self.zero.mesh.shape)}. Place it by "
                    "jax.device_put(state, zero.shardings(state, tx=tx)), or make one by init."
                )
        started = self._started([self._part(state, zero.mesh) for zero in self.zeros])
        if previous is None:
            return started
        if len(previous.anchor) != self.groups:
            raise ValueError(
                f"the previous local state has {len(previous.anchor)} groups, and LocalSteps has "
                f"groups={self.groups}: use as many, or leave it out, and the outer state is new."
            )

        def placed(old: Tree, new: Tree) -> Any:
            return jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), old, new)

        inner = self._mesh.size // self._mesh.shape[self._axis]
        by_replica = jax.tree.map(lambda x: x.reshape(-1, inner, *x.shape[1:]), previous.sync)
        sync = resize(by_replica, self._mesh.shape[self._axis])
        sync = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sync)
        return started._replace(
            outer=placed(previous.outer, started.outer),
            sync=placed(sync, started.sync),
            num_steps=previous.num_steps,
        )

    def merged(self, state: LocalState) -> Any:
        """An ordinary train state of ``zero``: synchronized parameters, the mean of all else.

        It has no state of a ``sync`` (``Zero.change_sync`` adds one). Of the first replica are
        integers, such as counts, parameters that are not trained, and states in few bits, whose
        codes have no mean. It can be saved, evaluated, and started again with any number of
        replicas. It shares no memory with ``state``.
        """

        def placed(x: jax.Array, like: jax.Array) -> jax.Array:
            x = self._on_mesh_of_zero(x)
            kind = like.sharding.memory_kind
            to = NamedSharding(self.zero.mesh, _spec_of_array(x), memory_kind=kind)
            return jax.device_put(x, to)

        def merge(*nodes: Any) -> Any:
            rule = _first_row if _is_coded(nodes[0]) else _merged_rows
            return jax.tree.map(lambda *parts: placed(self._over(rule, parts), parts[0]), *nodes)

        # Of each replica alone: states made one by one may have other functions as static fields.
        others = [with_params(each, None) for each in state.replicas]
        nodes = [jax.tree.leaves(each, is_leaf=_is_coded) for each in others]
        one = jax.tree.structure(others[0], is_leaf=_is_coded).unflatten(map(merge, *nodes))

        flat = [jax.tree.leaves(params_of(each)) for each in state.replicas]
        agreed = {
            i: x
            for group, anchor in zip(self._split(state.replicas[0]), state.anchor, strict=True)
            for i, x in zip(group, anchor, strict=True)
        }
        params = [
            placed(self._over(_first_row, parts) if i not in agreed else _copy(agreed[i]), parts[0])
            for i, parts in enumerate(zip(*flat, strict=True))
        ]
        structure = jax.tree.structure(params_of(state.replicas[0]))
        return with_params(one, structure.unflatten(params))

    # --- The step -----------------------------------------------------------------------------

    def put(self, batch: Batch, **options: Any) -> tuple[Any, ...]:
        """Places this process's rows, an equal part for each of its replicas, as ``Zero.put``.

        Raises:
          ValueError: as ``Zero.put``, and if replicas cannot have equal parts.
        """
        count = len(self.zeros)
        rows = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
        if any(n % count for n in rows):
            raise ValueError(
                f"a batch of {sorted(rows)} rows cannot be divided among {count} replicas equally."
            )

        def part(i: int) -> Any:
            return jax.tree.map(
                lambda x: x[len(x) // count * i :][: len(x) // count] if np.ndim(x) else x, batch
            )

        return tuple(zero.put(part(i), **options) for i, zero in enumerate(self.zeros))

    def train_step(self, loss_fn: AnyLoss, **options: Any) -> Callable[..., Any]:
        """``step(state, batch, key=None) -> (state, metrics)``, a local step of each replica.

        Arguments are those of ``Zero.train_step``. ``batch`` is what ``put`` returned, keys are
        folded by the number of the replica, and ``metrics`` is a tuple with those of each replica.

        Raises:
          ValueError: on options that ``LocalSteps`` decides; when called, on another state or batch
            than those of ``init``, ``start`` and ``put``.
        """
        if options.get("model_state") is True:
            raise ValueError(
                "LocalSteps keeps a model state with each replica: pass model_state= the name of "
                "its field in a TrainState, not True."
            )
        if options.setdefault("trainable", self.trainable) is not self.trainable:
            raise ValueError(
                "trainable differs from that of LocalSteps, which averages what is trained. Pass "
                "it to LocalSteps alone."
            )
        donate = options.get("donate", True)
        steps = [zero.train_step(loss_fn, **options) for zero in self.zeros]

        def step(state: LocalState, batch: Sequence[Any], key: Any = None) -> tuple[Any, Any]:
            if not isinstance(state, LocalState):
                raise ValueError(
                    "a step of LocalSteps takes the state that init or start of LocalSteps "
                    f"returned, got {type(state).__name__}."
                )
            if not isinstance(batch, tuple) or len(batch) != len(steps):
                raise ValueError(
                    "a step of LocalSteps takes the batch that put of LocalSteps returned, a part "
                    f"for each of its {len(steps)} replicas, got {type(batch).__name__}."
                )
            keys = [None if key is None else jax.random.fold_in(key, i) for i in self._numbers]
            done = [
                one(replica, rows, own_key)
                for one, replica, rows, own_key in zip(
                    steps, state.replicas, batch, keys, strict=True
                )
            ]
            num_steps = state.num_steps + 1
            state = state._replace(replicas=tuple(new for new, _ in done), num_steps=num_steps)
            for group in range(self.groups):
                if (num_steps + group * self.every // self.groups) % self.every == 0:
                    state = self._synchronize(state, group, donate)
            return state, tuple(metrics for _, metrics in done)

        return step

    def lower_sync(self, state: LocalState, group: int = 0) -> jax.stages.Lowered:
        """The program that synchronizes a group, for ``shd.audit`` and ``shd.wire_bytes``."""
        return self._program(state, group).lower(*self._arguments(state, group))

    # --- Replicas and the mesh of all ---------------------------------------------------------

    def _started(self, replicas: list[Any]) -> LocalState:
        opt_states = jax.tree.leaves(
            [opt_state_of(x) for x in replicas], is_leaf=lambda x: isinstance(x, MasterWeightsState)
        )
        if any(isinstance(x, MasterWeightsState) for x in opt_states):
            raise ValueError(
                "LocalSteps averages parameters, which master weights would overwrite in the next "
                "step. Store float32 parameters, and compute in Precision(compute=jnp.bfloat16)."
            )
        params = [jax.tree.leaves(params_of(each)) for each in replicas]
        groups = self._split(replicas[0])
        anchor = tuple(
            [self._over(_merged_rows, [of[i] for of in params]) for i in group] for group in groups
        )
        outer = tuple(map(self._init_outer, anchor))
        sync = tuple(
            self._init_sync(number, self._names(replicas[0], group), of_group)
            for number, (group, of_group) in enumerate(zip(groups, anchor, strict=True))
        )
        return LocalState(tuple(replicas), anchor, outer, sync, 0)

    def _split(self, state: Tree) -> list[list[int]]:
        """The numbers of the trained parameters, in groups of about equal bytes, in order."""
        params = params_of(state)
        mask = jax.tree.leaves(resolve_trainable(params, self.trainable))
        sizes = {i: x.nbytes for i, x in enumerate(jax.tree.leaves(params)) if mask[i]}
        if not sizes:
            raise ValueError("LocalSteps has no parameters to average: none is trained.")
        ends = np.cumsum(list(sizes.values()))
        middles = ends - np.array(list(sizes.values())) / 2
        group_of = (middles * self.groups // ends[-1]).astype(int)
        numbered = list(zip(sizes, group_of, strict=True))
        return [[i for i, g in numbered if g == group] for group in range(self.groups)]

    def _names(self, state: Tree, numbers: Sequence[int]) -> list[str]:
        """The paths of the parameters with these numbers."""
        paths = [path for path, _ in named_leaves(params_of(state))[0]]
        return [paths[i] for i in numbers]

    def _part(self, state: Tree, mesh: AnyMesh) -> Any:
        """One replica of a state on the mesh of all: the blocks of its devices, copied."""
        own = set(cast(Mesh, mesh).devices.flat)

        def part(x: jax.Array) -> jax.Array:
            blocks = [shard.data for shard in x.addressable_shards if shard.device in own]
            kind = x.sharding.memory_kind
            sharding = NamedSharding(mesh, _spec_of_array(x), memory_kind=kind)
            return jax.make_array_from_single_device_arrays(x.shape, sharding, blocks)

        parts = jax.tree.map(part, state)
        shardings = jax.tree.map(lambda x: x.sharding, parts)
        return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(parts)

    def _stacked(self, parts: Sequence[jax.Array]) -> jax.Array:
        """One array (replicas, ...) of the same array of each replica; nothing is sent."""
        shape, spec = parts[0].shape, _spec_of_array(parts[0])
        blocks = [s.data[None] for x in parts for s in x.addressable_shards]
        sharding = NamedSharding(self._mesh, PartitionSpec(self._axis, *spec))
        shape = (self._mesh.shape[self._axis], *shape)
        return jax.make_array_from_single_device_arrays(shape, sharding, blocks)

    def _unstacked(self, x: jax.Array) -> list[jax.Array]:
        """The array of each replica of this process, of one (replicas, ...)."""
        block_of = {s.device: s.data[0] for s in x.addressable_shards}
        spec = PartitionSpec(*_spec_of_array(x)[1:])
        return [
            jax.make_array_from_single_device_arrays(
                x.shape[1:],
                NamedSharding(zero.mesh, spec),
                [block_of[d] for d in zero.mesh.devices.flat if d in block_of],
            )
            for zero in self.zeros
        ]

    def _over(self, rule: Callable[[jax.Array], jax.Array], parts: Sequence[jax.Array]) -> Any:
        """What a rule makes of rows (replicas, ...), on the mesh of all replicas."""
        if isinstance(parts[0], jax.core.Tracer):  # of ``jax.eval_shape``: there are no devices
            return rule(jnp.broadcast_to(parts[0], (self._mesh.shape[self._axis], *parts[0].shape)))
        x = self._stacked(parts)
        out = NamedSharding(self._mesh, PartitionSpec(*_spec_of_array(x)[1:]))
        return jax.jit(rule, out_shardings=out)(x)

    def _on_mesh_of_zero(self, x: jax.Array) -> jax.Array:
        """The same blocks on the mesh of ``zero``, whose axes may have another order and type."""
        sharding = NamedSharding(self.zero.mesh, _spec_of_array(x))
        blocks = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, blocks)

    # --- Synchronization ----------------------------------------------------------------------

    def _synchronize(self, state: LocalState, group: int, donate: bool) -> LocalState:
        """The state after replicas agree on the parameters of a group."""
        program = self._program(state, group, donate)
        anchor, outer, sync, agreed = program(*self._arguments(state, group))
        leaves = [jax.tree.leaves(params_of(each)) for each in state.replicas]
        for number, x in zip(self._group(state, group), agreed, strict=True):
            for of, part in zip(leaves, self._unstacked(x), strict=True):
                of[number] = part
        replicas = [
            with_params(each, jax.tree.unflatten(jax.tree.structure(params_of(each)), of))
            for each, of in zip(state.replicas, leaves, strict=True)
        ]
        return state._replace(
            replicas=tuple(replicas),
            anchor=_with(state.anchor, group, anchor),
            outer=_with(state.outer, group, outer),
            sync=_with(state.sync, group, sync),
        )

    def _group(self, state: LocalState, group: int) -> list[int]:
        return self._split(state.replicas[0])[group]

    def _program(self, state: LocalState, group: int, donate: bool = True) -> Any:
        """Of a group: (anchor, outer, sync, local) to the new ones."""
        if (group, donate) not in self._programs:
            specs = [_spec_of_array(x) for x in state.anchor[group]]
            names = self._names(state.replicas[0], self._group(state, group))
            self._programs[group, donate] = jax.jit(
                functools.partial(self._average_and_update, names, specs),
                donate_argnums=(0, 1, 2, 3) if donate else (),
                out_shardings=jax.tree.map(lambda x: x.sharding, self._arguments(state, group)),
            )
        return self._programs[group, donate]

    def _arguments(self, state: LocalState, group: int) -> tuple[Any, ...]:
        params = [jax.tree.leaves(params_of(each)) for each in state.replicas]
        local = [self._stacked([of[i] for of in params]) for i in self._group(state, group)]
        return state.anchor[group], state.outer[group], state.sync[group], local

    def _average_and_update(
        self,
        names: list[str],
        specs: list[PartitionSpec],
        anchor: list[jax.Array],
        outer: Tree,
        sync: Tree,
        local: list[jax.Array],
    ) -> tuple[Any, ...]:
        """New anchor, states, and the parameters of each replica (replicas, ...)."""

        def mean(anchor: list[jax.Array], local: list[jax.Array], sync: Tree) -> Any:
            """Of the blocks of a device: what its replica moved, and the mean of all replicas."""
            moved = [
                a - b[0] for a, b in zip(_in_sum_dtype(anchor), _in_sum_dtype(local), strict=True)
            ]
            own = jax.tree.map(_first_row, sync)
            by_name = dict(zip(names, moved, strict=True))
            found, new = self._method.all_reduce(by_name, own, self._axis)
            return [found[name] for name in names], jax.tree.map(_as_row, new)

        of_replicas = [PartitionSpec(self._axis, *spec) for spec in specs]
        moved, sync = self._on_devices(
            mean, (specs, of_replicas, self._each_device), (specs, self._each_device)
        )(anchor, local, sync)
        updates, outer = self.outer.update(moved, outer, _in_sum_dtype(anchor))
        anchor = optax.apply_updates(anchor, updates)
        num = self._mesh.shape[self._axis]
        return anchor, outer, sync, [jnp.broadcast_to(x, (num, *x.shape)) for x in anchor]

    def _on_devices(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
        return jax.shard_map(fn, mesh=self._mesh, **specs)

    @property
    def _each_device(self) -> PartitionSpec:
        """A row for each device."""
        return PartitionSpec((self._axis, *self._others))

    def _init_outer(self, anchor: list[jax.Array]) -> Any:
        specs = [_spec_of_array(x) for x in anchor]
        found = state_specs(self.outer, _in_sum_dtype(anchor), specs, self._mesh)
        shardings = jax.tree.map(lambda s: NamedSharding(self._mesh, s), found, is_leaf=is_spec)
        return jax.jit(lambda x: self.outer.init(_in_sum_dtype(x)), out_shardings=shardings)(anchor)

    def _init_sync(self, group: int, names: list[str], anchor: list[jax.Array]) -> Any:
        def init(blocks: list[jax.Array]) -> Any:
            by_name = dict(zip(names, _in_sum_dtype(blocks), strict=True))
            return jax.tree.map(_as_row, self._method.init(by_name))

        specs = [_spec_of_array(x) for x in anchor]
        try:
            return jax.jit(self._on_devices(init, (specs,), self._each_device))(anchor)
        except ValueError as error:
            if self.groups == 1:
                raise
            raise ValueError(
                f"the sync of LocalSteps cannot start in group {group} of {self.groups}, which has "
                f"{first_names(map(repr, names))} alone, and a state of its own. Use a sync that "
                f"fits each group, or groups=1. It said: {error}"
            ) from error


def _is_own(devices: np.ndarray) -> bool:
    """Whether this process has devices of a replica."""
    return any(device.process_index == jax.process_index() for device in devices.flat)


def _spec_of_array(x: jax.Array) -> PartitionSpec:
    if isinstance(x, jax.core.Tracer):
        return PartitionSpec()
    return getattr(x.sharding, "spec", PartitionSpec())


def _in_sum_dtype(xs: Sequence[jax.Array]) -> list[jax.Array]:
    return list(map(to_sum_dtype, xs))


def _first_row(x: jax.Array) -> jax.Array:
    return x[0]


def _as_row(x: jax.Array) -> jax.Array:
    return jnp.asarray(x)[None]


def _is_on(x: Any, mesh: AnyMesh) -> bool:
    """Whether an array is on a mesh, or on another one of the same axes and devices."""
    own, want = getattr(getattr(x, "sharding", None), "mesh", None), cast(Mesh, mesh)
    if not isinstance(own, Mesh) or own.axis_names != want.axis_names:
        return False
    return np.array_equal(own.devices, want.devices)


def _is_coded(x: Any) -> bool:
    """Whether a node holds codes in few bits and their scales, which have no mean."""
    return isinstance(x, LowPrecisionState | Quantized)


def _copy(x: jax.Array) -> jax.Array:
    return jax.jit(jnp.copy, out_shardings=x.sharding)(x)


def _merged_rows(x: jax.Array) -> jax.Array:
    """The mean over replicas (replicas, ...); of what is not floating the first."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    return jnp.mean(x, 0, dtype=sum_dtype(x.dtype)).astype(x.dtype)


def _with(values: tuple[Any, ...], index: int, new: Any) -> tuple[Any, ...]:
    return (*values[:index], new, *values[index + 1 :])
