"""Evaluation leaf by leaf; what it is used for is tested with offload and low_precision_state."""

import jax
import jax.numpy as jnp

import optax_ext
from optax_ext.execution_order import run_by_leaf


def test_portable_passes_take_one_form_on_all_platforms():
    """Else no operation of a stack can run layer by layer."""
    tx = optax_ext.scale_by_came()
    params = {"w": jax.ShapeDtypeStruct((4, 512, 512), jnp.float32)}
    state = jax.eval_shape(tx.init, params)

    def trace(portable):
        def update(grads, state):
            return run_by_leaf(tx.update, grads, state, lambda x: x.ndim > 0, portable=portable)

        return str(jax.make_jaxpr(update)(params, state))

    assert "platform_index" in trace(False)
    assert "platform_index" not in trace(True)
    assert "platform_index" in trace(False)
