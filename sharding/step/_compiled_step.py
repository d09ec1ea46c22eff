"""Train states, batches, and functions that are compiled for the state they meet."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding

from sharding.placement._layout import no_mesh
from sharding.placement._specs import path_str


def parts(
    state: Any, tx: optax.GradientTransformation | None
) -> tuple[Any, Any, optax.GradientTransformation]:
    """(params, opt_state, tx) of a Flax ``TrainState`` or a pair."""
    if all(hasattr(state, name) for name in ("params", "opt_state", "tx", "replace")):
        if tx is not None and tx is not state.tx:
            raise ValueError("tx was given, but the train state has a tx of its own.")
        return state.params, state.opt_state, state.tx
    if isinstance(state, tuple) and len(state) == 2:
        if tx is None:
            raise ValueError("a state that is a pair (params, opt_state) needs the argument tx.")
        return state[0], state[1], tx
    raise _no_state(state)


def _no_state(found: Any) -> ValueError:
    return ValueError(
        "the state must be a Flax TrainState or a pair (params, opt_state), got "
        f"{type(found).__name__}."
    )


def params_of(state: Any) -> Any:
    """The parameters of a ``TrainState`` or a pair."""
    if isinstance(state, tuple) and len(state) == 2:
        return state[0]
    if not hasattr(state, "params"):
        raise _no_state(state)
    return state.params


def model_state_of(state: Any, names: Any) -> Any:
    """The fields of a ``TrainState`` that a loss takes as its model state.

    One name gives the field's value, several a dict.
    """
    if isinstance(names, str):
        return _field(state, names)
    return {name: _field(state, name) for name in names}


def _field(state: Any, name: str) -> Any:
    if isinstance(state, tuple) or not hasattr(state, name):
        raise ValueError(
            f"model_state={name!r} names no field of the train state, a {type(state).__name__}. A "
            "pair (params, opt_state) has none: use model_state=True, and give the model state in "
            "each call of the step."
        )
    return getattr(state, name)


def with_model_state(state: Any, names: Any, model_state: Any) -> Any:
    """A ``TrainState`` with other values of these fields."""
    fields = {names: model_state} if isinstance(names, str) else model_state
    return state.replace(**fields)


def step_key(state: Any, key: Any) -> Any:
    """The random key of this step: a key for the run folded by the step count."""
    if isinstance(state, tuple):
        if key is None:
            raise ValueError(
                "rngs=True with a state that is a pair needs a new key in each call: "
                "step(state, batch, key)."
            )
        return key
    return jax.random.fold_in(jax.random.key(0) if key is None else key, state.step)


def resolve_trainable(params: Any, trainable: Any) -> Any:
    """Whether each parameter is trained: as asked; never if it is no floating number.

    Raises:
      ValueError: if the mask does not match the parameters.
    """
    mask = trainable(params) if callable(trainable) else trainable
    try:
        mask = jax.tree.map(
            lambda choice, part: jax.tree.map(lambda _: bool(choice), part),
            True if mask is None else mask,
            params,
        )
    except ValueError as error:
        raise ValueError(f"trainable does not match the parameters: {error}") from None
    return jax.tree.map(
        lambda choice, x: choice and jnp.issubdtype(x.dtype, jnp.inexact), mask, params
    )


def check_placed(tree: Any, shardings: Any) -> None:
    """Raises if a real array lies otherwise than it should."""

    def check(path: Any, leaf: Any, want: NamedSharding) -> None:
        if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
            return
        have = getattr(leaf, "sharding", None)
        fits = have is not None and have.is_equivalent_to(want, jnp.ndim(leaf))
        if not fits or _explicit(have) > _explicit(want):
            raise ValueError(
                f"{path_str(path)!r} should lie on the mesh {dict(want.mesh.shape)} as "
                f"{want.spec}, found {have if have is not None else type(leaf).__name__}. Make "
                "the state with zero.init, or place it with "
                "jax.device_put(state, zero.shardings(state))."
            )

    jax.tree_util.tree_map_with_path(check, tree, shardings)


def _explicit(sharding: Any) -> set[str]:
    """The Explicit axes of its mesh; jax takes no arrays of these where Zero has Auto ones."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None:
        return set()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if kind == AxisType.Explicit}


def check_batch(batch: Any, devices: int, microbatches: int) -> None:
    """Raises unless the batch has rows, as many in each array, that divide over the devices.

    Args:
      batch: a tree of arrays; scalars are replicated.
      devices: that shard the batch.
      microbatches: of each device.

    Raises:
      ValueError: that names the arrays.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError(f"the batch is empty: it holds no arrays, only {batch!r}.")
    arrays = [(path_str(path) or "batch", tuple(x.shape)) for path, x in leaves if np.ndim(x)]
    for path, shape in arrays:
        if not shape[0]:
            raise ValueError(f"the batch is empty: {path!r} has shape {shape}.")
        if shape[0] != arrays[0][1][0]:
            raise ValueError(
                f"batch arrays {arrays[0][0]!r} of shape {arrays[0][1]} and {path!r} of shape "
                f"{shape} differ in their first dim, which is sharded: it has to be the batch in "
                "each array. Pass arrays that every device needs in full as model_state, or close "
                "over them."
            )
    for path, shape in arrays:
        if shape[0] % (devices * microbatches):
            raise ValueError(
                f"batch array {path!r} of shape {shape}: its first dim does not divide by "
                f"{devices} devices times {microbatches} micro-batches."
            )


def check_compiled() -> None:
    """Raises under ``jax.disable_jit``: without compiling, nothing is sharded."""
    config: Any = jax.config
    if config.jax_disable_jit:
        raise ValueError(
            "ZeRO's steps do not run under jax.disable_jit(): what shards arrays is compiled. To "
            "debug a loss, call it by itself, loss_fn(params, batch), or print from it with "
            "jax.debug.print; to run the step all the same, wrap it in jax.disable_jit(False)."
        )


def check_alive(state: Any, **others: Any) -> None:
    """Raises if an array was donated or deleted: jax itself may end the process.

    Args:
      state: a train state, or its parameters.
      **others: further arguments of the call, by name.

    Raises:
      ValueError: that names the array and says what to do.
    """
    for name, tree in {"state": state, **others}.items():
        # Runs in every step: the path of a leaf is made for the error alone.
        for i, x in enumerate(jax.tree.leaves(tree)):
            if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
                path, _ = jax.tree_util.tree_leaves_with_path(tree)[i]
                raise ValueError(_deleted(name, path_str(path), x))


def _deleted(name: str, path: str, x: jax.Array) -> str:
    at = f"{path!r} ({x.aval})" if path else f"{x.aval}"
    if name != "state":
        return (
            f"argument {name!r}: {at} was deleted, or donated to an earlier call of a jitted "
            "function. Make it anew for each call."
        )
    return (
        f"the state was donated to an earlier call of a step, which reused its memory: {at} is "
        "deleted. Go on with the state that the step returned: `state, metrics = step(state, "
        "batch)`. Where that is lost, make the state anew with zero.init, or restore a checkpoint; "
        "zero.train_step(..., donate=False) leaves the old state usable."
    )


def check_apart(donated: Any, others: Any, buffers: bool) -> None:
    """Raises if an array is given twice, once to be donated: jax itself may end the process.

    Args:
      donated: a tree whose memory is given away.
      others: further arguments.
      buffers: also find different arrays that share the memory of a CPU, which takes longer.

    Raises:
      ValueError: that names both.
    """

    def mark(x: jax.Array) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        if not buffers or is_key or not x.size or not x.addressable_shards:
            return id(x)
        shard = x.addressable_shards[0]
        on_cpu = shard.device.platform == "cpu"
        return shard.data.unsafe_buffer_pointer() if on_cpu else id(x)

    first: dict[Any, int] = {}
    given = jax.tree.leaves((donated, others))
    count = len(jax.tree.leaves(donated))
    for i, x in enumerate(given):
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            continue
        key = mark(x)
        if key in first and first[key] < count:
            paths = jax.tree_util.tree_leaves_with_path((donated, others))
            one, two = (path_str(paths[j][0]).partition("/")[2] for j in (first[key], i))
            raise ValueError(
                f"{one!r} of the state and {two!r} of the call are one array in memory, and the "
                "step donates the first. Copy one of them: jnp.copy(x), or zero.replicate(x) "
                "for a model state; or make the step with donate=False."
            )
        first.setdefault(key, i)


def signature_of(tree: Any) -> Any:
    """What distinguishes compiled functions: structure, shapes and dtypes of the arguments."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


class CompiledStep:
    """A jitted function of (state, batch), compiled for the first state and batch it meets.

    Only then is it known how they lie. Another structure or other shapes compile again, as in
    ``jax.jit``.
    """

    def __init__(
        self,
        compile_: Callable[[Any, Any], Callable[..., Any]],
        prepare: Callable[[Any], Any],
        select: Callable[[Any], Any] = lambda state: state,
        *,
        bring: Callable[[Any], Any] = lambda args: args,
        donates: bool = False,
    ):
        self._compile = compile_
        self._prepare = prepare
        self._select = select
        self._bring = bring
        self._donates = donates
        self._compiled: dict[Any, Any] = {}

    def __call__(self, state: Any, batch: Any, key: Any = None, model_state: Any = None) -> Any:
        """Runs the function."""
        check_compiled()
        selected = self._select(state)
        check_alive(selected, batch=batch, key=key, model_state=model_state)
        with no_mesh():
            batch = self._prepare(batch)
            key, model_state = self._bring((key, model_state))
            signature = signature_of((selected, batch))
            if self._donates:
                new = signature not in self._compiled
                others = {"batch": batch, "key": key, "model_state": model_state}
                check_apart(selected, others, buffers=new)
            run = self._jitted(signature, selected, batch)
            try:
                return run(selected, batch, key, model_state)
            except ValueError:
                # Of the same shapes, and placed otherwise: raises, or this is for that placement.
                run = self._compile(selected, batch)
                result = run(selected, batch, key, model_state)
                self._compiled[signature] = run
                return result

    def lower(
        self, state: Any, batch: Any, key: Any = None, model_state: Any = None
    ) -> jax.stages.Lowered:
        """Lowers the function for real or abstract arguments, as ``jax.jit(f).lower``."""
        selected = self._select(state)
        with no_mesh():
            batch = self._prepare(batch)
            run = self._jitted(signature_of((selected, batch)), selected, batch)
            return run.lower(selected, batch, key, model_state)

    def _jitted(self, signature: Any, selected: Any, batch: Any) -> Any:
        if signature not in self._compiled:
            self._compiled[signature] = self._compile(selected, batch)
        return self._compiled[signature]
