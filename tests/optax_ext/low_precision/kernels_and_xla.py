"""The forms of an update of 8-bit state on CPUs and GPUs, and on TPUs, side by side.

They round in other places, as XLA fuses them. Updates agree to 1e-6 of their largest element and
scales to 1e-6; one code, or bfloat16 number, in a thousand may be the next one.
"""

import jax
import numpy as np

from optax_ext import Quantized, kernels, low_precision_state


def gradients_of(step, params, dtype="float32"):
    """Rows differ by decades, so that blocks do; of full rank."""
    rng = np.random.default_rng(step)

    def make(x):
        rows = 10.0 ** rng.uniform(-4, 1, (*x.shape[:-1], 1))
        return (rng.normal(size=x.shape) * rows).astype(dtype)

    return jax.tree.map(make, params)


def params_of(shapes, dtype="float32"):
    rng = np.random.default_rng(99)
    return {k: rng.normal(size=s).astype(dtype) for k, s in shapes.items()}


def low(inner, **options):
    return low_precision_state(inner, **{"min_size": 0} | options)


class Interpreted(kernels.Shards):
    interpret = True


def interpreted(update):
    def call(*args):
        with kernels.kernels_on(Interpreted()):
            return update(*args)

    return jax.jit(call)


def assert_same(have, want):
    is_stored = lambda x: isinstance(x, Quantized)  # noqa: E731
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(have, is_leaf=is_stored),
        jax.tree.leaves(want, is_leaf=is_stored),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        if is_stored(a):
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
                if x.shape == a.shape:
                    assert np.mean(x != y) < 1e-3, name
                else:
                    np.testing.assert_allclose(x, y, rtol=1e-6, err_msg=name)
        else:
            narrow = a.dtype == jax.numpy.bfloat16
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            far = ~(np.abs(a - b) <= 1e-6 * np.max(np.abs(b)))  # NaN is
            assert np.mean(far) < 1e-3 * narrow or not np.any(far), name
            assert np.all(np.abs(a - b)[far] <= 2**-7 * np.abs(b)[far]), name


def check_steps(update, other, params, state, dtype="float32", num_steps=4):
    """Each step of the other form from a state of XLA's, so that no rounding adds up."""
    for step in range(num_steps):
        grads = gradients_of(step, params, dtype)
        want = update(grads, state, params)
        assert_same(other(grads, state, params), want)
        state = want[1]
