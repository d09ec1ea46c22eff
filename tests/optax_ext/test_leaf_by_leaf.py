"""Evaluation leaf by leaf; what it is used for is tested with offload and low_precision_state."""

import jax
import jax.numpy as jnp

import optax_ext
from optax_ext import _matrix_passes
from optax_ext.leaf_by_leaf import run_by_leaf
from optax_ext.traced_graph import Graph


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


def test_a_barrier_across_leaves_is_removed():
    """Else every output would need the state of all parameters."""
    with jax.set_mesh(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])):
        arrays = [jnp.ones(4), jnp.ones(4)]
        graph = Graph(
            lambda x: _matrix_passes.barrier(x) + _matrix_passes.reread(x, x), arrays, [True] * 2
        )
    assert [graph.reads[value] for value in graph.outputs] == [1, 2, 1, 2]
    assert not graph.equations or {e.primitive.name for e in graph.equations} == {"platform_index"}
