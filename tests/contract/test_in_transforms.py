"""Every transformation inside ``shard_map`` with its checks, ``vmap``, ``scan`` and ``cond``."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .table import SHAPES, assert_close, every, make, tree, types

SIZES = {"small": SHAPES, "large": {"w": (512, 1024), "b": (4,)}}


def two_steps(tx):
    """(whether each is taken, [gradients, state, params]) -> the same list."""

    def run(taken, trees):
        grads, *start = trees

        def step(carry, _):
            def take(state, params):
                updates, state = tx.update(grads, state, params)
                return [state, jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)]

            return jax.lax.cond(taken, take, lambda *carry: [*carry], *carry), None

        return [grads, *jax.lax.scan(step, start, None, length=2)[0]]

    return run


def of_w(change, tree, *rest):
    """Changes "w" and the state of it."""

    def leaf(path, x, *others):
        own = any(getattr(key, "key", None) == "w" for key in path)
        return change(x, *others) if own else x

    return jax.tree.map_with_path(leaf, tree, *rest)


def on_devices(num, run):
    """Every device has a "w" of its own, which outside have a first dim; all share "b"."""
    mesh = jax.make_mesh((num,), ("x",), (AxisType.Auto,), devices=jax.devices()[:num])

    def local(taken, trees):
        return of_w(lambda x: x[None], run(taken, of_w(lambda x: x[0], trees)))

    def sharded(taken, trees):
        specs = of_w(lambda _: P("x"), jax.tree.map(lambda _: P(), trees))
        run = jax.shard_map(local, mesh=mesh, in_specs=(P(), specs), out_specs=specs)
        return run(taken, trees)

    return sharded


@every
@pytest.mark.parametrize("size", SIZES)
def test_types(name, size):
    """Traced, for arrays on both sides of the sizes at which forms change."""
    tx, params, taken = make(name), tree(0, shapes=SIZES[size]), jnp.bool_(True)
    run, trees = two_steps(tx), [params, tx.init(params), params]
    assert types(jax.eval_shape(run, taken, trees)) == types(trees)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), (taken, trees))
    assert types(jax.eval_shape(jax.vmap(run), *two)) == types(two[1])
    for num in (1, 2):
        stacked = of_w(lambda x, num=num: jnp.stack([x] * num), trees)
        assert types(jax.eval_shape(on_devices(num, run), taken, stacked)) == types(stacked)
    one = jax.make_mesh((1,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:1])
    for spec in (P("x"), P(None, "x")):
        placed = of_w(lambda x, spec=spec: jax.device_put(x, NamedSharding(one, spec)), params)
        updates, _ = jax.eval_shape(tx.update, placed, jax.eval_shape(tx.init, placed), placed)
        chex.assert_trees_all_equal_shapes(updates, placed)


@pytest.mark.parametrize(
    ("name", "num"),
    [("came, every option", 1), ("came, every option", 2), ("low_precision_state", 2)],
)
def test_values(name, num, x64):
    """Each device updates its shard as if there were no other."""
    tx, taken = make(name, wide=True), jnp.bool_(True)
    shards = [tree(i, "float64", SIZES["large"]) for i in range(num)]
    params = [{"w": 10.0**i * shard["w"], "b": shards[0]["b"]} for i, shard in enumerate(shards)]
    trees, run = [[p, tx.init(p), p] for p in params], jax.jit(two_steps(tx))
    stacked = of_w(lambda *x: jnp.stack(x), *trees)
    have = jax.jit(on_devices(num, two_steps(tx)))(taken, stacked)
    for i, each in enumerate(trees):
        assert_close(of_w(lambda x, i=i: x[i], have), run(taken, each))
