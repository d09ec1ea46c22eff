"""Leaves of parameter trees: their paths, their slots in the state, the dtype of their averages."""

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._types import Array, DType, Tree

Dims = tuple[int, ...]


def path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


# --- Flax's boxes: an array and the names of its dims ---------------------------------------------


def is_box(x: Any) -> bool:
    """Whether this is ``nn.Partitioned``, another box of linen, or an nnx Variable."""
    nnx = sys.modules.get("flax.nnx")
    return hasattr(type(x), "replace_boxed") or (nnx is not None and isinstance(x, nnx.Variable))


def unboxed(x: Any) -> Any:
    return jax.tree.leaves(x, is_leaf=lambda y: y is not x)[0] if is_box(x) else x


def boxed(like: Any, value: Any, dims: Dims | None = None) -> Any:
    """Returns ``value`` in a box like that of ``like``, if any: ``dims`` of its dims; not None."""
    if value is None or not is_box(like):
        return value
    if dims is None:
        one = jax.tree.structure(like, is_leaf=lambda y: y is not like)
        return jax.tree.unflatten(one, [value])

    def names(spec: Any) -> Any:
        spec = getattr(spec, "spec", spec)  # of a NamedSharding
        return tuple(spec[d] if d < len(spec) else None for d in dims)

    if hasattr(type(like), "replace_boxed"):  # of linen
        return like.replace(value=value, names=names(like.names))
    metadata = like.get_metadata()
    keys = metadata.keys() & {"out_sharding", "optimizer_sharding"}
    return like.replace(value, **{k: metadata[k] and names(metadata[k]) for k in keys})


# --- Leaves ---------------------------------------------------------------------------------------


def at_least_float32(dtype: DType) -> Any:
    """Returns float32, or a wider ``dtype``: 16-bit averages stop moving at a decay of 0.999."""
    return jnp.promote_types(dtype, jnp.float32)


def wide_zeros(params: Tree, dtype: DType = None) -> Any:
    return jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=dtype or at_least_float32(p.dtype)), params
    )


def states_of(kind: type, state: Tree) -> list[Any]:
    parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in parts if isinstance(x, kind)]


def check_arrays(params: Tree) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        _validate.array(path_name(path), leaf)


@dataclasses.dataclass(frozen=True)
class Leaves:
    paths: list[str]  # the name of each leaf
    arrays: list[Any]  # the leaves
    boxes: list[Any]  # the leaves with their boxes
    treedef: Any  # the structure of the tree, whose leaves may be boxes

    @classmethod
    def of_any_dtype(cls, tree: Tree) -> "Leaves":
        """Flattens a tree; an array and its box are one leaf."""
        flat, treedef = jax.tree.flatten_with_path(
            tree, is_leaf=lambda x: is_box(x) and hasattr(unboxed(x), "dtype")
        )
        boxes = [leaf for _, leaf in flat]
        return cls([path_name(p) for p, _ in flat], list(map(unboxed, boxes)), boxes, treedef)

    @classmethod
    def of(cls, tree: Tree) -> "Leaves":
        """Flattens a tree; raises unless all leaves are real and floating."""
        leaves = cls.of_any_dtype(tree)
        for path, leaf in zip(leaves.paths, leaves.arrays, strict=True):
            _validate.floating(path, leaf)
        return leaves

    def unflatten(self, values: Sequence[Any], dims: Sequence[Dims] | None = None) -> Any:
        """Returns a tree of one value per leaf: of the leaf's shape, or of these ``dims`` of it."""
        kept = itertools.repeat(None) if dims is None else dims
        return self.treedef.unflatten(list(map(boxed, self.boxes, values, kept)))

    def slots(self, field: str, tree: Tree) -> list[Any]:
        """Returns each leaf's slot in a field of the state; None for leaves without one."""
        try:
            return list(map(unboxed, self.treedef.flatten_up_to(tree)))
        except ValueError as error:
            raise ValueError(
                f"the gradients' tree does not match the state's field {field!r}: "
                f"{_difference(self.treedef, tree) or error}"
            ) from None

    def arrays_in(self, field: str, tree: Tree) -> list[Any]:
        """Returns each leaf's array in a field of the state; raises unless the shapes agree."""
        arrays = self.slots(field, tree)
        for path, leaf, array in zip(self.paths, self.arrays, arrays, strict=True):
            check_shape(path, leaf, field, array)
        return arrays

    def averages_in(self, field: str, tree: Tree, dtype: DType = None) -> list[Any]:
        """Returns each leaf's average; raises if one was cast, too. None: float32 or wider."""
        arrays = self.arrays_in(field, tree)
        for path, array in zip(self.paths, arrays, strict=True):
            check_dtype(path, field, array, dtype)
        return arrays


def check_dtype(path: str, field: str, array: Array, dtype: DType = None) -> None:
    """Raises if an average of the state has not the ``dtype`` of ``init``: float32 or wider."""
    if array.dtype != (at_least_float32(array.dtype) if dtype is None else dtype):
        raise ValueError(
            f"{field!r} of parameter {path!r} has dtype {array.dtype}, and init made it "
            f"{dtype or 'float32'}: averages of narrow numbers stop moving. Restore a checkpoint "
            "in the dtypes of init; optax_ext.low_precision_state stores a state in fewer bits."
        )


def _difference(treedef: Any, tree: Tree) -> str:
    """Names the first leaf that the gradients or the state lack; empty if there is none."""

    def by_path(tree: Tree) -> dict[str, Any]:
        empty = lambda x: x is None or is_box(x) or isinstance(x, optax.MaskedNode)  # noqa: E731
        flat = jax.tree.leaves_with_path(tree, is_leaf=empty)
        return {path_name(path): leaf for path, leaf in flat}

    gradients = by_path(treedef.unflatten(range(treedef.num_leaves)))
    of_state = by_path(tree)
    for path, slot in of_state.items():
        if path not in gradients or (slot is not None and gradients[path] is None):
            return (
                f"there is no gradient of {path!r}, or it is None. Give zeros, or exclude the "
                "parameter with optax.masked or optax.partition."
            )
    more = [path for path in gradients if path not in of_state]
    return f"there is a gradient of {more[0]!r}, which has no state." if more else ""


def check_shape(path: str, gradient: Any, field: str, array: Array) -> None:
    shape = getattr(array, "shape", None)
    if gradient.shape != shape:
        raise ValueError(
            f"gradient {path!r} of shape {tuple(gradient.shape)} does not match {field!r}, where "
            f"it {f'is {array!r}' if shape is None else f'has shape {tuple(shape)}'}."
        )
