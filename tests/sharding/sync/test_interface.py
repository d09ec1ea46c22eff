"""The interface that all sync methods share, its collectives on TPUs, and errors of arguments."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import sync
from sharding.collectives import _reduce_scatter

from .harness import SyncRunner, mesh_of, stacked

SHAPES = {"embed": (64, 8), "mlp/in": (24, 40), "b": (24,)}


def test_the_first_pattern_decides(x64):
    rules = {"mlp": sync.powersgd(2), "^m": sync.dense(), "embed$": sync.top_k(0.1, min_size=1)}
    params = {k: jax.ShapeDtypeStruct(s, float) for k, s in SHAPES.items()}
    message = r"by_path: pattern '\^m' is the first match of no path.* 'embed', 'mlp/in'"
    with pytest.raises(ValueError, match=message):
        sync.by_path(rules).init(params)
    del rules["^m"]
    state = jax.eval_shape(sync.by_path(rules).init, params)
    assert set(state[0].arrays["mlp/in"]) == {"q", "error"}
    assert set(state[1].arrays["embed"]) == {"error"}
    assert state[2].arrays == {"b": ()}


def test_a_nonfinite_number_is_nan_in_its_array_alone(x64):
    """On all devices, and the state is unchanged; a plain mean is NaN at its element alone."""
    lossy = {
        "top": sync.top_k(0.1, min_size=1),
        "code": sync.qsgd(8, rounding="nearest", min_size=1),
        "power": sync.powersgd(2),
        "zip": sync.gradzip(2),
    }
    shapes = {f"{m}/{k}": (24, 40) for m in lossy for k in ("bad", "good")} | {"dense": (24,)}
    runner = SyncRunner(sync.by_path(lossy), shapes, 4)
    for step, bad in enumerate((np.nan, np.inf, -np.inf)):
        runner(stacked(step, shapes, 4))
        before = jax.device_get(runner.state)
        grads = stacked(1, shapes, 4)
        for name in lossy:
            grads[f"{name}/bad"][2, 3, 4] = bad
        grads["dense"][1, 3] = np.nan
        have, after = runner(grads), jax.device_get(runner.state)
        for i, name in enumerate(lossy):
            assert np.isnan(have[f"{name}/bad"]).all()
            assert np.isfinite(have[f"{name}/good"]).all()
            changed = {
                k: any(map(np.any, jax.tree.map(np.not_equal, old, new).values()))
                for (k, old), new in zip(
                    before[i].arrays.items(), after[i].arrays.values(), strict=True
                )
                if old
            }
            want = {f"{name}/bad": False, f"{name}/good": True}
            assert changed == ({} if name == "code" else want)
        assert np.isnan(have["dense"][3])
        assert np.isfinite(np.delete(have["dense"], 3)).all()
    assert np.isfinite(runner(stacked(2, shapes, 4))["top/bad"]).all()


@pytest.mark.parametrize("num", [2, 5])
def test_resize_keeps_the_mean(num):
    rng = np.random.default_rng(0)
    state = {"error": rng.normal(size=(4, 3, 5)).astype("f4"), "step": np.full(4, 7, np.int32)}
    have = jax.jit(sync.resize, static_argnums=1)(state, num)
    assert have["error"].shape == (num, 3, 5)
    np.testing.assert_allclose(
        have["error"], np.broadcast_to(np.mean(state["error"], 0), (num, 3, 5)), rtol=1e-6
    )
    np.testing.assert_array_equal(have["step"], np.full(num, 7))


def test_vectors_are_gathered_in_tiles_on_tpus(monkeypatch):
    """And the padding is removed; other programs for TPUs would all-reduce them."""
    monkeypatch.setattr(_reduce_scatter, "current_platform", lambda: "tpu")
    rng = np.random.default_rng(0)
    sizes, dtypes = (5, 1024, 1500), (jnp.int32, jnp.uint8)
    xs = [rng.integers(0, 200, (4, n)).astype(d) for n in sizes for d in dtypes]
    run = jax.shard_map(
        lambda xs: [_reduce_scatter.all_gather_concat(x[0], ("data",)) for x in xs],
        mesh=mesh_of(data=4),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    for have, x in zip(jax.jit(run)(xs), xs, strict=True):
        np.testing.assert_array_equal(have, x.ravel())

    # All vectors that methods gather, by their dtypes.
    methods = {"a": sync.agsparse(0.05), "t": sync.top_k(0.05), "z": sync.zen(0.05)}
    shapes = dict.fromkeys(methods, (2**15 - 100, 5))
    text = SyncRunner(sync.by_path(methods), shapes, 4, dtype=jnp.float32).jaxpr()
    padded = re.findall(r"([if])32\[4,(\d+)\] = all_gather\[", text)
    assert {dtype for dtype, _ in padded} == {"i", "f"}
    assert all(int(size) % 1024 == 0 for _, size in padded)
    assert not re.search(r"[if]32\[\d+\] = all_gather\[", text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sync.gradzip(0), "rank must be an integer of at least 1, got 0"),
        (lambda: sync.top_k(1.5), "density must be above 0 and at most 1, got 1.5"),
        (lambda: sync.top_k({3: 0.5}), "an entry for step 0"),
        (lambda: sync.top_k(feedback="sum"), "feedback must be 'error', 'ef21' or None"),
        (lambda: sync.top_k(feedback="ef21", momentum=0.9), "momentum needs feedback='error'"),
        (lambda: sync.qsgd(3), "bits must be 4 or 8, got 3"),
        (lambda: sync.qsgd(rounding="up"), "rounding must be one of"),
        (lambda: sync.dense("int8"), "dtype must be a floating dtype"),
        (lambda: sync.zen(density=1.1), "density must be above 0 and at most 1, got 1.1"),
        (lambda: sync.by_path({"w": "dense"}), "the rule of pattern 'w' must be a GradientSync"),
        (
            lambda: sync.powersgd(16).init({"w": jnp.zeros((64, 8))}),
            r"rank 16 compresses no parameter: .*\(64, 8\)",
        ),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "options"),
    [("qsgd", {}), ("top_k", {}), ("top_k", {"momentum": 0.9}), ("zen", {}), ("agsparse", {})],
)
def test_a_sync_that_compresses_nothing_is_refused(name, options):
    method = getattr(sync, name)(**options)
    small, large = jnp.zeros((5, 800)), jnp.zeros((5, 820))
    message = rf"{name}: min_size 4096 compresses no parameter: .*\(5, 800\)"
    with pytest.raises(ValueError, match=message):
        sync.by_path({"w": method}).init({"w": small})
    method.init({"w": small, "large": large})
    sync.by_path({"w": sync.dense()}, default=method).init({"w": small})
