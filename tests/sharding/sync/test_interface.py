"""The interface that all sync methods share, and the errors of bad arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import sync
from sharding.collectives import _all_gather

from .harness import SyncRunner, mesh_of, stacked

SHAPES = {"embed": (64, 8), "mlp/in": (24, 40), "b": (24,)}


def test_the_first_pattern_decides(x64):
    rules = {"mlp": sync.powersgd(2), "^m": sync.dense(), "embed$": sync.top_k(0.1, min_size=1)}
    with pytest.raises(
        ValueError,
        match=r"by_path: pattern '\^m' is the first match of no path.* 'embed', 'mlp/in'",
    ):
        SyncRunner(sync.by_path(rules), SHAPES, 2)
    del rules["^m"]
    method = sync.by_path(rules)
    state = method.init({k: jnp.zeros(s) for k, s in SHAPES.items()})
    assert set(state[0].arrays["mlp/in"]) == {"q", "error"}
    assert set(state[1].arrays["embed"]) == {"error"}
    assert state[2].arrays == {"b": ()}


def test_the_state_of_a_gradient_that_is_none_is_unchanged(x64):
    method = sync.top_k(0.1, min_size=1)
    params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
    grads = {k: jnp.ones(s) for k, s in SHAPES.items()} | {"embed": None}

    def run(grads):
        return method.all_reduce(grads, method.init(params), "data")

    mapped = jax.shard_map(
        run, mesh=mesh_of(2), in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    mean, state = jax.jit(mapped)(grads)
    assert mean["embed"] is None
    np.testing.assert_array_equal(state.arrays["embed"]["error"], 0)
    assert np.any(state.arrays["mlp/in"]["error"])


def test_a_nonfinite_number_is_nan_in_its_array_alone(x64):
    """On all devices, and the state is unchanged."""
    for method in (sync.top_k(0.1, min_size=1), sync.qsgd(8, min_size=1), sync.powersgd(2)):
        runner = SyncRunner(method, SHAPES, 4)
        for bad in (np.nan, np.inf, -np.inf):
            runner(stacked(0, SHAPES, 4))
            before = runner.state_of("mlp/in")
            grads = stacked(1, SHAPES, 4)
            grads["mlp/in"][2, 3, 4] = bad
            have = runner(grads)
            assert np.isnan(have["mlp/in"]).all()
            assert np.isfinite(have["embed"]).all()
            for a, b in zip(
                *map(jax.tree.leaves, (before, runner.state_of("mlp/in"))), strict=True
            ):
                np.testing.assert_array_equal(a, b)
            assert np.isfinite(runner(stacked(2, SHAPES, 4))["mlp/in"]).all()


def test_dense_propagates_nan(x64):
    grads = stacked(0, SHAPES, 2)
    grads["b"][1, 3] = np.nan
    have = SyncRunner(sync.dense(), SHAPES, 2)(grads)["b"]
    assert np.isnan(have[3])
    assert np.isfinite(np.delete(have, 3)).all()


@pytest.mark.parametrize("num", [1, 2, 5])
def test_resize_keeps_the_mean(num):
    rng = np.random.default_rng(0)
    state = {"error": jnp.asarray(rng.normal(size=(4, 3, 5))), "step": jnp.full(4, 7, jnp.int32)}
    have = jax.jit(sync.resize, static_argnums=1)(state, num)
    assert have["error"].shape == (num, 3, 5)
    np.testing.assert_allclose(
        have["error"], np.broadcast_to(np.mean(state["error"], 0), (num, 3, 5)), rtol=1e-6
    )
    np.testing.assert_array_equal(have["step"], np.full(num, 7))


@pytest.mark.parametrize("size", [5, 1024, 1500])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_vectors_are_gathered_in_tiles_on_tpus(size, dtype, monkeypatch):
    """And the padding is removed."""
    monkeypatch.setattr(_all_gather, "current_platform", lambda: "tpu")
    x = jnp.asarray(np.random.default_rng(0).integers(0, 200, (4, size)), dtype)
    run = jax.shard_map(
        lambda x: _all_gather.all_gather_concat(x[0], ("data",)),
        mesh=mesh_of(4),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    np.testing.assert_array_equal(run(x), x.ravel())


def test_outside_a_shard_map():
    grads = {"w": jnp.ones((8, 8))}
    for method in (sync.dense(), sync.top_k(0.5), sync.qsgd()):
        with pytest.raises(ValueError, match=r"axis 'data' .* is not one of the manual axes"):
            method.all_reduce(grads, method.init(grads), "data")
        with pytest.raises(ValueError, match="at least one mesh axis, got \\(\\)"):
            method.all_reduce(grads, method.init(grads), ())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sync.powersgd(0), "rank must be an integer of at least 1, got 0"),
        (lambda: sync.powersgd(2.0), "rank must be an integer"),
        (lambda: sync.powersgd(2, alternate=True, warm_start=False), "alternate needs warm_start"),
        (lambda: sync.powersgd(start_step=-1), "start_step must not be negative"),
        (lambda: sync.powersgd(min_compression=0.5), "min_compression must be at least 1"),
        (lambda: sync.top_k(0.0), "density must be above 0 and at most 1, got 0.0"),
        (lambda: sync.top_k(1.5), "density must be above 0 and at most 1, got 1.5"),
        (lambda: sync.top_k({3: 0.5}), "an entry for step 0"),
        (lambda: sync.top_k(feedback="sum"), "feedback must be 'error', 'ef21' or None"),
        (lambda: sync.top_k(feedback="ef21", momentum=0.9), "momentum needs feedback='error'"),
        (lambda: sync.top_k(momentum=1.0), "momentum must be at least 0 and below 1"),
        (lambda: sync.top_k(nesterov=True), "nesterov needs momentum"),
        (lambda: sync.top_k(clip_norm=0), "clip_norm must be positive"),
        (lambda: sync.qsgd(3), "bits must be 4 or 8, got 3"),
        (lambda: sync.qsgd(block_size=7), "block_size must be even"),
        (lambda: sync.qsgd(norm="l1"), "norm must be one of max, l2"),
        (lambda: sync.qsgd(rounding="up"), "rounding must be one of"),
        (lambda: sync.dense("int8"), "dtype must be a floating dtype"),
        (
            lambda: sync.by_path({"(": sync.dense()}),
            "by_path: pattern '\\(' is not a regular expression",
        ),
        (lambda: sync.by_path({"w": "dense"}), "the rule of pattern 'w' must be a GradientSync"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_rank_that_compresses_nothing():
    with pytest.raises(ValueError, match=r"rank 16 compresses no parameter: .*\(64, 8\)"):
        sync.powersgd(16).init({k: jnp.zeros(s) for k, s in SHAPES.items()})
