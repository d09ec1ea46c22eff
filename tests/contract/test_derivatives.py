"""Steps can be differentiated, in reverse as forwards, also where a norm or a gradient is zero."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from .table import SHAPES, TRANSFORMATIONS

NAMES = [name for name, row in TRANSFORMATIONS.items() if not (row.blocks or row.rounds_parameters)]
SCALE = 0.3
FORMS = {
    "random": lambda rng, shape: rng.normal(size=shape),
    "large": lambda rng, shape: 1e15 * rng.normal(size=shape),  # squares, times 2^90, overflow
    "zero": lambda rng, shape: np.zeros(shape),
}


@pytest.mark.parametrize("name", NAMES)
def test_reverse_equals_forward(name):
    """The derivative of two steps by a number in the loss, for all forms in one program."""
    row = TRANSFORMATIONS[name]
    rng = np.random.default_rng(0)
    starts = {
        form: {k: jnp.asarray(draw(rng, s), jnp.float32) for k, s in SHAPES.items()}
        for form, draw in FORMS.items()
    }
    weights = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}

    def end(scale, params, gradient):
        params = {k: p * (1 + scale) for k, p in params.items()}
        if "mask" not in str(row.arguments):
            params["empty"] = jnp.zeros((0, 3))
        tx = row()
        state = tx.init(params)
        for _ in range(2):
            grads = {k: gradient * (p - scale) * weights.get(k, p) for k, p in params.items()}
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return sum(jnp.sum(params[k] * weights[k]) for k in SHAPES)

    @jax.jit
    def both(scale, params):
        reverse = jax.grad(end)(scale, params, 1.0)
        return reverse, jax.jvp(lambda s: end(s, params, 1.0), (scale,), (1.0,))[1]

    for form, start in starts.items():
        reverse, forward = both(SCALE, start)
        assert np.isfinite(reverse), form
        np.testing.assert_allclose(reverse, forward, rtol=1e-3, atol=1e-6, err_msg=form)
    if "lars" in name:  # no worse than optax's own; those of Adam and LAMB are not finite there
        assert np.isfinite(jax.jit(jax.grad(end))(SCALE, starts["random"], 0.0))
