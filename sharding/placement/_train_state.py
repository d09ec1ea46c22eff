"""Train states: a Flax ``TrainState``, or a pair ``(params, opt_state)``; their export."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from sharding._types import Array, OptState, Tree


def parts(state: Tree, tx: Any) -> tuple[Any, Any, optax.GradientTransformation]:
    """(params, opt_state, tx) of a Flax ``TrainState`` or a pair."""
    check_tx(tx)
    if all(hasattr(state, name) for name in ("params", "opt_state", "tx", "replace")):
        if tx is not None and tx is not state.tx:
            raise ValueError(
                "the argument tx differs from the tx of the TrainState. Leave the argument out."
            )
        return state.params, state.opt_state, state.tx
    if _is_pair(state):
        if tx is None:
            raise ValueError(
                "a train state that is a pair (params, opt_state) needs the argument tx, the "
                "transformation of opt_state."
            )
        return state[0], state[1], tx
    raise _not_a_train_state(state)


def check_tx(tx: Any) -> None:
    """Raises unless an argument ``tx`` is None or a transformation."""
    if tx is not None and not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            f"tx must be an optax.GradientTransformation, such as optax.adamw(1e-3), got {tx!r}."
        )


def _is_pair(state: Tree) -> bool:
    """Whether a state is a plain tuple of two; methods of ``Zero`` return such tuples."""
    return type(state) is tuple and len(state) == 2


def _not_a_train_state(state: Tree) -> ValueError:
    size = f" of {len(state)}" if isinstance(state, tuple) else ""
    return ValueError(
        "a train state must be a Flax TrainState or a pair (params, opt_state), a plain tuple, got "
        f"{type(state).__name__}{size}. Make one with flax's TrainState.create(apply_fn=..., "
        "params=..., tx=...), or as the pair (params, tx.init(params)) and pass tx= to the methods "
        "of Zero (docs: start/your_script)."
    )


def params_of(state: Tree) -> Any:
    if _is_pair(state):
        return state[0]
    if not hasattr(state, "params"):
        raise _not_a_train_state(state)
    return state.params


def model_state_of(state: Tree, names: str | tuple[str, ...] | bool) -> Tree:
    """The fields of a ``TrainState`` that a loss takes as its model state; None for a bool."""
    if isinstance(names, bool) or not names:
        return None
    if not isinstance(names, str):
        return {name: model_state_of(state, name) for name in names}
    if isinstance(state, tuple) or not hasattr(state, names):
        raise ValueError(
            f"model_state={names!r} names no field of the train state, a {type(state).__name__}. A "
            "pair (params, opt_state) has none: use model_state=True, and pass the model state in "
            "each call of the step."
        )
    return getattr(state, names)


def with_model_state(state: Tree, names: str | tuple[str, ...], model_state: Tree) -> Any:
    return state.replace(**({names: model_state} if isinstance(names, str) else model_state))


def opt_state_of(state: Tree) -> Any:
    return state[1] if isinstance(state, tuple) else state.opt_state


def with_opt_state(state: Tree, opt_state: OptState) -> Any:
    return (state[0], opt_state) if isinstance(state, tuple) else state.replace(opt_state=opt_state)


def with_params(state: Tree, params: Tree) -> Any:
    return (params, state[1]) if isinstance(state, tuple) else state.replace(params=params)


def _is_form(x: Any) -> bool:
    """Whether a node of parameters is a form of ``sharding.stored``, a layer above this one."""
    return hasattr(type(x), "trained_marks")


def trained_in_forms(params: Tree) -> Any:
    """Which parts of forms are trained, as these say; arrays are not."""
    return jax.tree.map(lambda x: _is_form(x) and x.trained_marks(), params, is_leaf=_is_form)


def resolve_trainable(params: Tree, trainable: Tree) -> Any:
    """Whether each parameter is trained: as requested, and never if it is not floating.

    Where nothing is requested, all are, or what forms say if there are any.
    """
    if trainable is None and any(map(_is_form, jax.tree.leaves(params, is_leaf=_is_form))):
        trainable = trained_in_forms(params)
    # A module that is a tree, such as one of Equinox, is a mask even if it can be called.
    is_function = callable(trainable) and all(x is trainable for x in jax.tree.leaves(trainable))
    mask = trainable(params) if is_function else trainable
    try:
        mask = jax.tree.broadcast(True if mask is None else mask, params)
    except ValueError as error:
        raise ValueError(f"trainable does not match the parameters: {error}") from None
    return jax.tree.map(
        lambda choice, x: bool(choice) and jnp.issubdtype(x.dtype, jnp.inexact), mask, params
    )


def resolve_trained(params: Tree, trainable: Tree) -> Any:
    """``resolve_trainable``, of what trains.

    Raises:
      ValueError: if that is nothing, and was not requested.
    """
    trained = resolve_trainable(params, trainable)
    if trainable is None and not any(jax.tree.leaves(trained)):
        raise ValueError(
            "nothing is trained: of parameters in stored forms adapters are. Add stored.lora, or "
            "say by trainable= what is."
        )
    return trained


def full_tree(tree: Tree) -> Tree:
    """A tree of global arrays as unsharded NumPy arrays in host memory, on every process."""
    return jax.tree.map(_full, tree)


def _full(x: Array) -> np.ndarray:
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return np.asarray(jax.device_get(x))
    # The devices gather one array at a time, and free it when it is on the host.
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(x).addressable_data(0))
