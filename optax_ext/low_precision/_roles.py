"""What each field of a state is: an average, which low precision suits, or what it would spoil.

The fields of common states are known. Those of others are tried: ``inner`` takes some hundred
steps on parameters of at most 8 elements a dim.
"""

import concurrent.futures
import warnings
from collections.abc import Iterable
from typing import Any

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


def find_signs(inner: Any, params: Tree, fields: Iterable[Any]) -> dict[Any, bool]:
    """Returns the fields, of classes and paths, that suit low precision, and if they are signed."""
    # Left out: sums, which do not change where gradients are zero; copies of parameters; what moves
    # an update by several times its own error, as terms of a small difference; what fails.
    known, unknown = {}, []
    for cls, path in dict.fromkeys(fields):
        if cls in _AVERAGES:
            known[path] = path[-1].name not in _AVERAGES[cls]
        elif cls not in _EXACT:
            unknown.append(path)
    return known | (_tried(inner, params, unknown) if unknown else {})


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
                    return _signs(inner, params, fields, extra_args)
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
        stacklevel=5,
    )
    return {}


def _small(x: Array) -> tuple[int, ...]:
    return tuple(min(_SIDE, n) for n in x.shape)


def _signs(inner: Any, params: Tree, fields: list[Any], extra_args: Any) -> dict[Any, bool]:
    """Tries fields on small parameters: returns those that suit low precision, and if signed."""
    shapes = {path: _small(x) for path, x in jax.tree.leaves_with_path(params)}
    rng, num = np.random.default_rng(0), len(fields)

    def random(x: Array) -> jax.Array:
        one, two = rng.normal(size=(2, *_small(x)))
        return jnp.asarray(one * np.exp(2 * two), x.dtype)

    params, mean, *noises = (jax.tree.map(random, params) for _ in range(2 + _RANDOM))
    state = jax.jit(inner.init)(params)
    # The arrays to look at: their fields, and where they are in the state; their parameters.
    numbers = {path: i for i, path in enumerate(shapes)}
    arrays = [
        (field, i, numbers[path[len(field) :]])
        for i, (path, x) in enumerate(jax.tree.leaves_with_path(state))
        for field in fields
        if path[: len(field)] == field and shapes.get(path[len(field) :]) == jnp.shape(x)
    ]

    def update(grads: Tree, state: Tree, params: Tree) -> Any:
        more = {"grad": grads, **extra_args} if extra_args else {}
        return inner.update(grads, state, params, **more)

    @jax.jit
    def advance(params: Tree, state: Tree, steps: Any, noise: Any, mean: Any) -> Any:
        """Takes steps with gradients ``noise * random + mean``; without noise, parameters stay."""
        random = jax.tree.map(lambda *x: noise * jnp.stack(x), *noises)
        none = jnp.zeros(len(arrays), bool)

        def step(i: Any, carry: Any) -> Any:
            params, state, (negative, copied, _) = carry
            grads = jax.tree.map(lambda r, m: (r[i] + m).astype(m.dtype), random, mean)
            updates, new = update(grads, state, params)
            moved = optax.apply_updates(params, updates)
            was, now, before, after = map(jax.tree.leaves, (state, new, params, moved))
            each = [(now[i], was[i], before[j], after[j]) for _, i, j in arrays]
            seen = (  # negative; copies of parameters; not changed by the last step
                negative | jnp.array([jnp.any(x < 0) for x, _, _, _ in each]),
                copied | jnp.array([jnp.all(x == b) | jnp.all(x == a) for x, _, b, a in each]),
                jnp.array([jnp.all(x == w) & jnp.any(x != 0) for x, w, _, _ in each]),
            )
            return jax.tree.map(lambda a, b: jnp.where(noise > 0, a, b), moved, params), new, seen

        return jax.lax.fori_loop(0, steps, step, (params, state, (none, none, none)))

    @jax.jit
    def errors(params: Tree, state: Tree) -> jax.Array:
        """Returns the relative error of updates if each field in turn has one."""

        def updates(scales: jax.Array) -> list[jax.Array]:
            flat = jax.tree.leaves(state)
            for field, i, _ in arrays:
                flat[i] = (flat[i] * scales[fields.index(field)]).astype(flat[i].dtype)
            new = jax.tree.unflatten(jax.tree.structure(state), flat)
            return jax.tree.leaves(update(mean, new, params)[0])

        worst = jnp.zeros(num)
        for x in jax.lax.map(updates, 1 - _ERROR * jnp.eye(num + 1, num, -1)):
            size, moved = jnp.max(jnp.abs(x[0])), jnp.abs(x[1:] - x[:1]).reshape(num, -1).max(1)
            told = (moved != 0) & jnp.isfinite(size)  # not where the gradients alone are too much
            worst = jnp.maximum(worst, jnp.where(told, moved / size, 0))
        return jnp.where(jnp.isnan(worst), jnp.inf, worst)

    zeros, now, copies = jax.tree.map(jnp.zeros_like, mean), *map(jax.tree.leaves, (state, params))
    copied = np.array([bool(jnp.all(now[i] == copies[j])) for _, i, j in arrays])
    params, state, seen = advance(params, state, _RANDOM, 1.0, zeros)
    used = [bool(jnp.any(jax.tree.leaves(state)[i] != 0)) for _, i, _ in arrays]
    worst = errors(params, state)
    params, state, equal = advance(params, state, _EQUAL, 0.0, mean)
    worst = np.maximum(worst, errors(params, state))
    _, _, still = advance(zeros, state, _ZERO, 0.0, zeros)
    negative = np.asarray(seen[0] | equal[0])
    copied |= np.asarray(seen[1] | equal[1])
    fits = np.array(used) & ~copied & ~np.asarray(still[2])
    out = {}
    for field, error in zip(fields, worst, strict=True):
        of = [n for n, (f, _, _) in enumerate(arrays) if f == field]
        if of and all(fits[of]) and error <= _MOST * _ERROR:
            out[field] = bool(any(negative[of]))
    return out
