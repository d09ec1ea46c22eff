"""From arrays to forms and back: few bits, adapters, masks; by the paths of parameters."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext import Dynamic, Float8, Linear
from optax_ext.low_precision import quantize
from sharding._types import Tree
from sharding.placement._specs import check_patterns, key_of_path, leaf_names, plain_path
from sharding.placement._train_state import trained_in_forms
from sharding.stored import _normal_float
from sharding.stored._forms import (
    Adapted,
    Coded,
    Form,
    Masked,
    column_norms,
    decoded,
    each_array,
    each_of_stack,
    is_form,
)

# From an array, or the form that a step before made of it, to a form: ``(x, path, key)``.
Step = Callable[[Any, str, jax.Array | None], Any]
CodedFormat = Dynamic | Float8 | Linear


def frozen(bits: int | CodedFormat = 4, *, dims: int = 2) -> Step:
    """A parameter that is stored in few bits, and has neither a gradient nor a state.

    Args:
      bits: 4 is NF4 with scales in 8 bits (4.127 bits an element), of which the last dim must be a
        multiple of 64; 8 is ``Dynamic(8)``; or a format, such as ``Linear(4)`` or ``Float8()``.
      dims: how many last dims are one array, with scales of its own; those before it, such as one
        of layers, stack arrays.

    Raises:
      ValueError: if ``bits`` is none of these, or, once it is stored, a parameter does not suit it.

    Example:
      >>> import jax.numpy as jnp
      >>> from sharding import stored
      >>> w = stored.store({"w": jnp.ones((64, 256))}, {"w": stored.frozen(8)})["w"]
      >>> w.shape, w.nbytes / w.decode().nbytes
      ((64, 256), 0.25390625)
    """
    if not isinstance(bits, CodedFormat) and bits not in (4, 8):
        raise ValueError(f"frozen takes 4 or 8 bits, or a format of optax_ext, got {bits!r}.")
    fmt = Dynamic(8) if bits == 8 else bits

    def encode(x: jax.Array) -> Any:
        if isinstance(fmt, int):
            return _normal_float.encode(x)
        return quantize(x.astype(jnp.float32), fmt, signed=True)

    def step(x: Any, path: str, key: Any) -> Form:
        del key
        if not isinstance(x, Adapted):  # which is merged
            _check_array(x, path, "frozen")
        if isinstance(fmt, int) and x.shape[-1] % _normal_float.BLOCK:
            raise ValueError(
                f"{path} has shape {tuple(x.shape)}, and NF4 needs rows of a multiple of "
                f"{_normal_float.BLOCK} elements. Give it frozen(8), or leave it out."
            )
        stacked = max(len(x.shape) - dims, 0)
        read = min(stacked, x.stacked) if is_form(x) else stacked  # an array, or several, at a time
        each = each_of_stack(encode, stacked - read)
        encoded = each_array(lambda one: each(decoded(one)), x, read)
        if is_form(encoded):
            return encoded
        parts, kind = jax.tree.flatten(encoded)
        return Coded(tuple(parts), kind, x.dtype)

    return step


def lora(
    rank: int,
    alpha: float | None = None,
    *,
    dora: bool = False,
    rows: int = 1,
    columns: int = 1,
    dtype: Any = None,
) -> Step:
    """A low-rank addition ``alpha / rank * A B`` to a parameter, which is then frozen itself.

    A is drawn from U(-1/sqrt(n), 1/sqrt(n)), n the number of rows, and B is zero.

    Args:
      rank: columns of A and rows of B.
      alpha: None for ``rank``, a scale of 1.
      dora: whether magnitudes of the columns are trained, too, as in DoRA.
      rows: how many dims are rows, as two in a kernel (heads, head_dim, width).
      columns: how many last dims are columns.
      dtype: of A and B; None for the parameter's.

    Raises:
      ValueError: if the rank is above the rows or columns of a parameter, or there is no key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from sharding import stored
      >>> form = stored.lora(rank=4, alpha=8)
      >>> w = stored.store({"w": jnp.ones((3, 64, 256))}, {"w": form}, jax.random.key(0))["w"]
      >>> w.a.shape, w.b.shape, w.scale
      ((3, 64, 4), (3, 4, 256), 2.0)
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora: the rank must be an integer of at least 1, got {rank!r}.")

    def step(x: Any, path: str, key: Any) -> Form:
        if not is_form(x):
            _check_array(x, path, "lora")
        shape, first, last = tuple(x.shape), len(x.shape) - rows - columns, len(x.shape) - columns
        if isinstance(x, Adapted | Masked) or first < 0:
            raise ValueError(
                f"{path} of shape {shape} cannot get an adapter of {rows + columns} dims: it needs "
                "an array, or frozen codes, of so many dims at least."
            )
        num_rows = int(np.prod(shape[first:last]))
        if rank > min(num_rows, int(np.prod(shape[last:]))):
            raise ValueError(f"lora: rank {rank} is above a dim of {path}, of shape {shape}.")
        if key is None:
            raise ValueError("lora draws A: give store(..., key).")
        bound = num_rows**-0.5
        of_a = (*shape[:last], rank)
        a = jax.random.uniform(key, of_a, jnp.float32, -bound, bound).astype(dtype or x.dtype)
        b = jnp.zeros((*shape[:first], rank, *shape[last:]), a.dtype)
        form = Adapted(_in_memory(x), a, b, (rank if alpha is None else alpha) / rank, columns)
        if not dora:
            return form
        norms = each_array(lambda w: column_norms(decoded(w), columns), form.base, first)
        return dataclasses.replace(form, magnitude=norms.astype(a.dtype))

    return step


def masked(sparsity: float) -> Step:
    """A pruned parameter: the share ``sparsity`` of its smallest magnitudes is zero, and stays so.

    Args:
      sparsity: the share that is zero.

    Raises:
      ValueError: if the share is not at least 0 and below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from sharding import stored
      >>> w = stored.store({"w": jnp.array([1.0, -4, 3, 2])}, {"w": stored.masked(0.5)})["w"]
      >>> w.decode().tolist()
      [0.0, -4.0, 3.0, 0.0]
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"masked: the sparsity must be at least 0 and below 1, got {sparsity!r}.")

    def step(x: Any, path: str, key: Any) -> Form:
        del key
        _check_array(x, path, "masked")
        values = jnp.asarray(_in_memory(x))
        size = jnp.abs(values)
        return Masked(values, size >= jnp.quantile(size.astype(jnp.float32), sparsity))

    return step


def store(
    params: Tree,
    forms: Mapping[str, Step | Sequence[Step]],
    key: jax.Array | None = None,
    *,
    like: Tree | None = None,
) -> Any:
    """Parameters, of which some are stored in forms.

    Args:
      params: a tree of arrays. Those in host memory, or in files (``Lazy``, and what else has
        ``shape``, ``dtype`` and slices), are encoded an array of a stack at a time, and stay in
        host memory: there is at most one in full, and at most one on a device.
      forms: by a regular expression of a path, such as ``"layers/.*/kernel"``, what is done to the
        array: one of ``frozen``, ``lora`` and ``masked``, or ``(frozen(4), lora(16))``. The first
        expression found in a path counts.
      key: of the adapters.
      like: the parameters of the loss, or their types, whose paths and shapes are compared with
        those of a file. Dtypes stay those of the file.

    Raises:
      ValueError: if an expression matches no parameter or gives no form, a form does not suit a
        parameter, or parameters differ from ``like``; all before anything is read or encoded.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from sharding import stored
      >>> params = {"layers": jnp.ones((3, 128, 256), jnp.bfloat16), "norm": jnp.ones(128)}
      >>> params = stored.store(params, {"layers": stored.frozen(4)})
      >>> params["layers"].shape, params["layers"].nbytes * 8 / (3 * 128 * 256)
      ((3, 128, 256), 4.1279296875)
    """
    check_patterns("store", forms)
    for pattern, steps in forms.items():
        _check_steps(pattern, steps)
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_form)
    given = dict(zip(paths_of(params), leaves, strict=True))
    if like is not None:
        _check_like(given, like)
    chosen = {path: next((p for p in forms if re.search(p, path)), None) for path in given}
    if unused := sorted(forms.keys() - set(chosen.values())):
        raise ValueError(
            f"store: {', '.join(map(repr, unused))} matches no parameter that an expression before "
            f"it does not; there are {', '.join([*given][:8])}{' ...' if len(given) > 8 else ''}."
        )

    def form_of(path: str, x: Any) -> Any:
        pattern = chosen[path]
        steps = () if pattern is None else forms[pattern]
        for number, step in enumerate(steps if isinstance(steps, Sequence) else [steps]):
            if number and isinstance(x, Adapted):
                raise ValueError(
                    f"{path} gets an adapter, and then another form. lora is last, as in "
                    "(frozen(4), lora(16))."
                )
            own = None if key is None else jax.random.fold_in(key_of_path(key, path), number)
            x = step(x, path, own)
        return _in_memory(x)

    alike = {}  # one of those that are
    for path, x in given.items():
        if chosen[path] is not None:
            type_of = x if is_form(x) else jax.ShapeDtypeStruct(x.shape, x.dtype)
            alike[chosen[path], str(type_of)] = path, type_of
    for path, type_of in alike.values():
        jax.eval_shape(functools.partial(form_of, path), type_of)
    return treedef.unflatten(form_of(path, x) for path, x in given.items())


def _check_steps(pattern: str, steps: Any) -> None:
    for step in steps if isinstance(steps, Sequence) else [steps]:
        if not callable(step):
            raise ValueError(
                f"store: {pattern!r} is given {step!r}: give stored.frozen(4), stored.lora(16) or "
                "stored.masked(...), or several of them. A path is one string, 'layers/mlp/kernel'."
            )


def paths_of(params: Tree) -> list[str]:
    return list(map(plain_path, leaf_names(params, is_leaf=is_form)))


def trained(params: Tree) -> Any:
    """Which parts are trained, for ``optax.masked``: adapters, masked values.

    ``train_step`` and others train these where ``trainable`` is left out.

    Args:
      params: parameters, of which some are stored in forms.

    Returns:
      A tree of bools.

    Example:
      >>> import jax.numpy as jnp
      >>> from sharding import stored
      >>> params = {"v": jnp.ones(4), "w": jnp.ones(4)}
      >>> params = stored.store(params, {"w": stored.masked(0.0)})
      >>> stored.trained(params)
      {'v': False, 'w': Masked(values=True, kept=False)}
    """
    return trained_in_forms(params)


def _in_memory(x: Any) -> Any:
    """An array, of one that is in a file."""
    is_elsewhere = hasattr(x, "__array__") and not isinstance(x, jax.Array | np.ndarray)
    return np.asarray(x) if is_elsewhere else x


def _check_like(found: dict[str, Any], like: Tree) -> None:
    leaves = jax.tree.leaves(like, is_leaf=is_form)
    expected = dict(zip(paths_of(like), leaves, strict=True))
    for path in [*expected, *found]:
        shapes = [tuple(of[path].shape) if path in of else None for of in (found, expected)]
        if shapes[0] != shapes[1]:
            given, wanted = ("none" if x is None else f"one of shape {x}" for x in shapes)
            raise ValueError(
                f"store: of {path} there is {given}, and the loss takes {wanted} (like). Read the "
                "parameters of this model (docs: how_to/freeze)."
            )


def _check_array(x: Any, path: str, what: str) -> None:
    if is_form(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        kind = type(x).__name__ if is_form(x) else f"an array of {x.dtype}"
        raise ValueError(f"{what} takes an array of floating numbers, and {path} is {kind}.")
