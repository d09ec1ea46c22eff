"""What each field of a state is: an average, which low precision suits, or what it would spoil.

The fields of common states are known. Those of others are tried: ``inner`` takes some hundred
steps on parameters of at most 8 elements a dim.
"""

import concurrent.futures
import functools
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext._adafactor import MomentumState, ScaleByAdafactorState
from optax_ext._came import ScaleByCameState
from optax_ext._lamb import ScaleByLambState
from optax_ext._lars import LarsMomentumState
from optax_ext._leaves import path_name
from optax_ext._master_weights import MasterWeightsState
from optax_ext._types import Array, Tree

# States of averages and of sums of squares, and which fields are never negative.
_AVERAGES: dict[type, tuple[str, ...]] = {
    MomentumState: (),
    LarsMomentumState: (),
    optax.TraceState: (),
    optax.EmaState: (),
    optax.ScaleByLionState: (),
    ScaleByAdafactorState: ("nu",),
    ScaleByCameState: ("nu",),
    ScaleByLambState: ("nu",),
    optax.FactoredState: ("v",),
    optax.ScaleByAdamState: ("nu",),
    optax.ScaleByBeliefState: ("nu",),
    optax.ScaleByAmsgradState: ("nu", "nu_max"),
    optax.ScaleByRmsState: ("nu",),
    optax.ScaleByRpropState: ("step_sizes",),
    optax.ScaleByRssState: ("sum_of_squares",),
}
# States of parameters; of sums until they are emptied; of the terms of a small difference.
_EXACT = (MasterWeightsState, optax.MultiStepsState, optax.ScaleByRStdDevState)

_SIDE = 8  # elements a dim of parameters that are tried
_RANDOM, _EQUAL, _ZERO = 8, 500, 8  # steps of gradients of each kind
_ERROR = 2.0**-7  # relative, of a field
_MOST = 4  # times as large as this may be that of the update


def fields_of(state: Tree, flat: list[Any], params: Tree) -> list[Any]:
    """Returns the class and path of each array's field; None if it is not of a parameter."""
    shapes = {path: leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    fields = []
    for path, leaf in flat:
        shape = getattr(leaf, "shape", None)
        ends = (i for i in range(len(path) + 1) if path[i:] in shapes and shapes[path[i:]] == shape)
        end = next(ends, None)
        fields.append(None if end is None else (_class_of(state, path[:end]), path[:end]))
    return fields


def _class_of(node: Any, path: Any) -> type | None:
    """Returns the class of which the last key of a path is an attribute."""
    if not path or not isinstance(path[-1], jax.tree_util.GetAttrKey):
        return None
    for key in path[:-1]:
        if isinstance(key, jax.tree_util.GetAttrKey):
            node = getattr(node, key.name)
        else:
            node = node[key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key]
    return type(node)


def find_signs(inner: Any, structure: Any, types: Any, fields: Iterable[Any]) -> dict[Any, bool]:
    """Returns the fields, of classes and paths, that suit low precision, and if they are signed.

    ``types`` are shapes and dtypes of the parameters, whose tree has this ``structure``.
    """
    # Left out: sums, which do not change where gradients are zero; copies of parameters; what moves
    # an update by several times its own error, as terms of a small difference; what fails.
    known, unknown = {}, []
    for cls, path in dict.fromkeys(fields):
        if cls in _AVERAGES:
            known[path] = path[-1].name not in _AVERAGES[cls]
        elif cls not in _EXACT:
            unknown.append(path)
    if not unknown:
        return known
    params = structure.unflatten([jax.ShapeDtypeStruct(*each) for each in types])
    return known | _tried(inner, params, unknown)


def _tried(inner: Any, params: Tree, fields: list[Any]) -> dict[Any, bool]:
    """Tries fields in a thread, which the trace and the mesh of here do not reach."""
    x64 = jax.dtypes.canonicalize_dtype(float) == np.float64

    def value(p: Any) -> Any:
        return sum(jnp.sum(x * x) for x in jax.tree.leaves(p))

    def run() -> dict[Any, bool] | Exception:
        errors = []
        # What some transformations need, and others refuse.
        for extra_args in ({}, {"value": 1.0, "value_fn": value, "obj_fn": value}):
            try:
                with jax.enable_x64(x64):
                    return _Trial(inner, params, fields, extra_args).signs()
            except Exception as error:
                errors.append(error)
        return errors[0]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        signs = pool.submit(run).result()
    if not isinstance(signs, Exception):
        return signs
    names = ", ".join(path_name(field) or "the state" for field in fields)
    warnings.warn(
        f"low_precision_state: {names} could not be tried on small arrays, and stay as they "
        f"are unless formats selects them: {type(signs).__name__}: {signs}",
        stacklevel=4,
    )
    return {}


class _Seen(NamedTuple):
    """What steps have shown of each array of the state; each (arrays,), bool."""

    negative: jax.Array  # it had negative elements
    copied: jax.Array  # it was equal to its parameter
    used: jax.Array  # it is not 0
    still: jax.Array  # the last step has not changed it


class _Trial:
    """A transformation of small parameters: which fields of its state suit low precision."""

    def __init__(self, inner: Any, params: Tree, fields: list[Any], extra_args: dict[str, Any]):
        rng = np.random.default_rng(0)
        shapes = {
            path: tuple(min(_SIDE, n) for n in x.shape)
            for path, x in jax.tree.leaves_with_path(params)
        }

        def random(path: Any, x: Array) -> jax.Array:
            one, two = rng.normal(size=(2, *shapes[path]))
            return jnp.asarray(one * np.exp(2 * two), x.dtype)

        trees = [jax.tree.map_with_path(random, params) for _ in range(2 + _RANDOM)]
        self.params, self.mean, *self._noises = trees
        self.state = jax.jit(inner.init)(self.params)
        self._inner = inner
        self._extra_args = extra_args
        self._fields = fields
        # The arrays to look at: the numbers of their fields, and of the leaves of the state and of
        # the parameters.
        numbers = {path: i for i, path in enumerate(shapes)}
        self._arrays = [
            (k, i, numbers[path[len(field) :]])
            for i, (path, x) in enumerate(jax.tree.leaves_with_path(self.state))
            for k, field in enumerate(fields)
            if path[: len(field)] == field and shapes.get(path[len(field) :]) == jnp.shape(x)
        ]

    def signs(self) -> dict[Any, bool]:
        """Returns the fields that suit low precision, and if they are signed."""
        zeros = jax.tree.map(jnp.zeros_like, self.mean)
        advance = jax.jit(self._advance)
        errors = jax.jit(self._errors)
        params, state, random = advance(self.params, self.state, _RANDOM, 1.0, zeros)
        worst = errors(params, state)
        params, state, equal = advance(params, state, _EQUAL, 0.0, self.mean)
        worst = np.maximum(worst, errors(params, state))
        _, _, zero = advance(zeros, state, _ZERO, 0.0, zeros)
        fits = np.asarray(random.used & ~(random.copied | equal.copied) & ~zero.still)
        negative = np.asarray(random.negative | equal.negative)
        numbers = np.array([k for k, _, _ in self._arrays])
        return {
            field: bool(np.any(negative[numbers == k]))
            for k, field in enumerate(self._fields)
            if k in numbers and np.all(fits[numbers == k]) and worst[k] <= _MOST * _ERROR
        }

    def _update(self, grads: Tree, state: Tree, params: Tree) -> Any:
        more = {"grad": grads, **self._extra_args} if self._extra_args else {}
        return self._inner.update(grads, state, params, **more)

    def _advance(self, params: Tree, state: Tree, steps: Any, noise: Any, mean: Any) -> Any:
        """Takes steps with gradients ``noise * random + mean``; without noise, parameters stay."""
        random = jax.tree.map(lambda *x: noise * jnp.stack(x), *self._noises)
        none = jnp.zeros(len(self._arrays), bool)

        def step(i: Any, carry: Any) -> Any:
            params, state, seen = carry
            grads = jax.tree.map(lambda r, m: (r[i] + m).astype(m.dtype), random, mean)
            updates, new = self._update(grads, state, params)
            moved = optax.apply_updates(params, updates)
            was, now, before, after = map(jax.tree.leaves, (state, new, params, moved))
            arrays = [(was[i], now[i], before[j], after[j]) for _, i, j in self._arrays]
            copied = [jnp.all(w == b) | jnp.all(x == b) | jnp.all(x == a) for w, x, b, a in arrays]
            seen = _Seen(
                negative=seen.negative | jnp.array([jnp.any(x < 0) for _, x, _, _ in arrays]),
                copied=seen.copied | jnp.array(copied),
                used=jnp.array([jnp.any(x != 0) for _, x, _, _ in arrays]),
                still=jnp.array([jnp.all(x == w) & jnp.any(x != 0) for w, x, _, _ in arrays]),
            )
            params = jax.tree.map(lambda a, b: jnp.where(noise > 0, a, b), moved, params)
            return params, new, seen

        return jax.lax.fori_loop(0, steps, step, (params, state, _Seen(none, none, none, none)))

    def _errors(self, params: Tree, state: Tree) -> jax.Array:
        """Returns the relative error of updates if each field in turn has one."""
        num = len(self._fields)
        worst = jnp.zeros(num)
        scales = 1 - _ERROR * jnp.eye(num + 1, num, -1)  # of no field, of each one
        updates = functools.partial(self._scaled_update, params, state)
        for x in jax.lax.map(updates, scales):
            size = jnp.max(jnp.abs(x[0]))
            moved = jnp.max(jnp.abs(x[1:] - x[:1]).reshape(num, -1), 1)
            told = (moved != 0) & jnp.isfinite(size)  # not where the gradients alone are too much
            worst = jnp.maximum(worst, jnp.where(told, moved / size, 0))
        return jnp.where(jnp.isnan(worst), jnp.inf, worst)

    def _scaled_update(self, params: Tree, state: Tree, scales: jax.Array) -> list[jax.Array]:
        """Returns the update by ``mean`` after each field was multiplied with its scale."""
        flat, treedef = jax.tree.flatten(state)
        for k, i, _ in self._arrays:
            flat[i] = (flat[i] * scales[k]).astype(flat[i].dtype)
        return jax.tree.leaves(self._update(self.mean, treedef.unflatten(flat), params)[0])
