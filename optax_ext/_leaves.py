"""Leaves of parameter trees: their paths, their slots in the state, the dtype of their averages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate


def path_name(path: Any) -> str:
    """Returns the keys of a path, joined by ``/``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def parameter_name(path: Any) -> str:
    """Returns ``path_name`` without the ``.value`` of a Flax box around the parameter."""
    boxed = len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value")
    return path_name(path[:-1] if boxed else path)


def at_least_float32(dtype: Any) -> Any:
    """Returns float32, or a wider ``dtype``: 16-bit averages stop moving at a decay of 0.999."""
    return jnp.promote_types(dtype, jnp.float32)


def check_arrays(params: Any) -> None:
    """Raises unless all parameters are arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        _validate.array(parameter_name(path), leaf)


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The leaves of a tree of parameters or gradients.

    Attributes:
      paths: the name of each leaf.
      arrays: the leaves.
      treedef: the structure of the tree.
    """

    paths: list[str]
    arrays: list[Any]
    treedef: Any

    @classmethod
    def of(cls, tree: Any) -> "Leaves":
        """Flattens a tree; raises unless all leaves are real and floating."""
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        paths = [parameter_name(path) for path, _ in flat]
        arrays = [leaf for _, leaf in flat]
        for path, leaf in zip(paths, arrays, strict=True):
            _validate.floating(path, leaf)
        return cls(paths, arrays, treedef)

    def unflatten(self, values: Sequence[Any]) -> Any:
        """Returns a tree of one value per leaf."""
        return self.treedef.unflatten(values)

    def slots(self, field: str, tree: Any) -> list[Any]:
        """Returns each leaf's slot in a field of the state; None for leaves without one."""
        return slots(self.treedef, field, tree)

    def arrays_in(self, field: str, tree: Any) -> list[Any]:
        """Returns each leaf's array in a field of the state; raises unless the shapes agree."""
        found = self.slots(field, tree)
        for path, leaf, array in zip(self.paths, self.arrays, found, strict=True):
            check_shape(path, leaf, field, array)
        return found

    def averages_in(self, field: str, tree: Any, dtype: Any = None) -> list[Any]:
        """Returns each leaf's average; raises if one was cast, too. None: float32 or wider."""
        found = self.arrays_in(field, tree)
        for path, array in zip(self.paths, found, strict=True):
            check_dtype(path, field, array, dtype)
        return found


def check_dtype(path: str, field: str, array: Any, dtype: Any = None) -> None:
    """Raises if an average of the state has not the ``dtype`` of ``init``: float32 or wider."""
    if array.dtype != (at_least_float32(array.dtype) if dtype is None else dtype):
        raise ValueError(
            f"{field!r} of parameter {path!r} has dtype {array.dtype}, and init made it "
            f"{dtype or 'float32'}: averages of narrow numbers stop moving. Restore a checkpoint "
            "in the dtypes of init; optax_ext.low_precision_state stores a state in fewer bits."
        )


def slots(treedef: Any, field: str, tree: Any) -> list[Any]:
    """Returns what a field of the state has for each leaf of a structure."""
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"the gradients' tree does not match the state's field {field!r}: "
            f"{_difference(treedef, tree) or error}"
        ) from None


def _difference(treedef: Any, tree: Any) -> str:
    """The first leaf that the gradients or the state lack, in words; empty if there is none."""

    def by_path(tree: Any) -> dict[str, Any]:
        empty = lambda x: x is None or isinstance(x, optax.MaskedNode)  # noqa: E731
        flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=empty)
        return {path_name(path): leaf for path, leaf in flat}

    gradients, of_state = by_path(treedef.unflatten(range(treedef.num_leaves))), by_path(tree)
    for path, slot in of_state.items():
        if path not in gradients or (slot is not None and gradients[path] is None):
            return (
                f"there is no gradient of {path!r}, or it is None. Give zeros, or exclude the "
                "parameter with optax.masked or optax.partition."
            )
    more = [path for path in gradients if path not in of_state]
    return f"there is a gradient of {more[0]!r}, which has no state." if more else ""


def check_shape(path: str, gradient: Any, field: str, array: Any) -> None:
    """Raises unless a gradient has the shape of its array in ``field``."""
    found = getattr(array, "shape", None)
    if gradient.shape != found:
        raise ValueError(
            f"gradient {path!r} of shape {tuple(gradient.shape)} does not match {field!r}, where "
            f"it {f'is {array!r}' if found is None else f'has shape {tuple(found)}'}."
        )
