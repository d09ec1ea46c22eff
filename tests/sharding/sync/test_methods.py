"""Every sync method against NumPy in float64 over many steps; bounds of errors and means."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_ext
from sharding import sync
from sharding.collectives._block_codec import dequantize, quantize

from .harness import SyncRunner, stacked
from .traces import DEVICES, RANK, SHAPES, START, STEPS

GOLDEN = pathlib.Path(__file__).with_name("golden") / "powersgd.npz"
# No number of devices divides 37.
BIG = {"w": (24, 40), "stack": (3, 16, 20), "b": (37,)}
SHARD_DIMS = {"w": -1, "stack": -2, "b": 0}


def norm(x):
    return float(np.linalg.norm(x))


def assert_close(have, want, tolerance):
    for k, x in want.items():
        assert norm(have[k] - x) <= tolerance * norm(x), k


# --- Dense ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 8])
@pytest.mark.parametrize("dims", [None, SHARD_DIMS], ids=["means", "shards"])
def test_dense(num, dims, x64):
    runner = SyncRunner(sync.dense(), BIG, num, dims)
    for step in range(3):
        grads = stacked(step, BIG, num)
        assert_close(runner(grads), {k: g.mean(0) for k, g in grads.items()}, 1e-15)


def test_dense_in_a_narrow_dtype(x64):
    runner = SyncRunner(sync.dense("bfloat16"), BIG, 4)
    assert "bf16[24,40]" in str(jax.make_jaxpr(runner.mapped)(stacked(0, BIG, 4), runner.state))
    grads = stacked(0, BIG, 4)
    want = {k: np.asarray(jnp.asarray(g).astype("bfloat16"), np.float64) for k, g in grads.items()}
    assert_close(runner(grads), {k: g.mean(0) for k, g in want.items()}, 2**-8)


# --- PowerSGD -------------------------------------------------------------------------------------


def reference_powersgd(m, q):
    """One step of the paper: mean, new Q, and the residual in the form of ``powersgd``."""
    q = np.linalg.qr(q)[0]
    p = np.linalg.qr(np.sum(m @ q, 0))[0]
    own = np.swapaxes(m, -1, -2) @ p
    q = own.mean(0)
    return p @ np.swapaxes(q, -1, -2), q, m - p @ np.swapaxes(own, -1, -2)


def test_powersgd_equals_pytorch(x64):
    """The same means as torch's hook with the same first Q, whose residuals have the usual form.

    Power iteration on noise is chaotic: rounding errors grow tenfold in about ten steps.
    """
    golden = np.load(GOLDEN)
    runner = SyncRunner(sync.powersgd(RANK, start_step=START, min_compression=1.5), SHAPES, DEVICES)
    for name, cols in (("w", 20), ("v", 8)):
        q = np.broadcast_to(golden[f"q/{cols}"], (DEVICES, 1, cols, RANK))
        runner.state.arrays[name]["q"] = jnp.asarray(q)
    for step in range(STEPS):
        have = runner(stacked(step, SHAPES, DEVICES))
        for name in SHAPES:
            want = golden[f"{name}/{step}"]
            most = 2e-13 if step < 20 else 1e-10
            assert norm(have[name] - want) < most * norm(want), (name, step)


@pytest.mark.parametrize("dims", [None, SHARD_DIMS], ids=["means", "shards"])
def test_powersgd_over_hundreds_of_steps(dims, x64):
    """Each step from the state of ``powersgd``, since rounding errors grow over steps."""
    num, rank, steps = 4, 3, 300
    runner = SyncRunner(sync.powersgd(rank, min_compression=1.0), BIG, num, dims)
    for step in range(steps):
        grads = stacked(step, BIG, num)
        before = {k: runner.state_of(k) for k in ("w", "stack")}
        have = runner(grads)
        for k, old in before.items():
            m = grads[k] + old["error"]
            q = old["q"][0].reshape(*BIG[k][:-2], *old["q"].shape[-2:])
            want, q, error = reference_powersgd(m, q)
            new = runner.state_of(k)
            assert norm(have[k] - want) < 1e-12 * norm(want), (k, step)
            assert norm(new["error"] - error) < 1e-12 * norm(error), (k, step)
            assert norm(new["q"][0].reshape(q.shape) - q) < 1e-12 * norm(q), (k, step)
            assert norm(new["q"] - new["q"][:1]) == 0
        np.testing.assert_allclose(have["b"], grads["b"].mean(0), rtol=1e-14)


def test_powersgd_residuals_stay_bounded(x64):
    """The usual form grows with the root of the steps, from the same start."""
    num, shapes = 4, {"w": (48, 64)}
    runner = SyncRunner(sync.powersgd(2), shapes, num)
    q = runner.state_of("w")["q"][0]
    usual, sizes = np.zeros((num, 1, 48, 64)), {}
    for step in range(400):
        grads = stacked(step, shapes, num)
        runner(grads)
        m = grads["w"][:, None] + usual
        mean, q, _ = reference_powersgd(m, q)
        usual = m - mean
        if step in (49, 399):
            sizes[step] = norm(runner.state_of("w")["error"]), norm(usual)
    assert sizes[399][0] < 1.3 * sizes[49][0]
    assert sizes[399][1] > 2 * sizes[49][1]


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_powersgd_is_exact_for_low_ranks(rank, x64):
    """Each matrix of a stack by itself, of very different scale."""
    rng = np.random.default_rng(rank)
    shapes = {"stack": (3, 24, 20)}
    scale = np.array([1e-4, 1.0, 1e4])[:, None, None]
    left = rng.normal(size=(4, 3, 24, rank))
    grads = {"stack": scale * (left @ rng.normal(size=(3, rank, 20)))}
    runner = SyncRunner(sync.powersgd(rank, min_compression=1.0), shapes, 4)
    for _ in range(2):
        have = runner(grads)["stack"]
    want = grads["stack"].mean(0)
    for i in range(3):
        assert norm(have[i] - want[i]) < 1e-12 * norm(want[i])


def test_powersgd_of_zero_and_rank_deficient_gradients(x64):
    runner = SyncRunner(sync.powersgd(4, min_compression=1.0), {"w": (24, 40)}, 4)
    zeros = runner({"w": np.zeros((4, 24, 40))})["w"]
    np.testing.assert_array_equal(zeros, 0)
    one = np.zeros((4, 24, 40))
    one[:, 3, 5] = [1.0, 2.0, 3.0, 4.0]
    for _ in range(3):  # Q is zero after zeros
        have = runner({"w": one})["w"]
    assert np.isfinite(have).all()
    sent = 3 * one.mean(0) - runner.state_of("w")["error"].mean(0)
    assert norm(sent - 3 * one.mean(0)) < 1e-12


def test_alternate_powersgd(x64):
    """Against NumPy for 200 steps, each step from the state of ``powersgd``."""
    num, rank = 4, 3
    runner = SyncRunner(sync.powersgd(rank, alternate=True, min_compression=1.0), BIG, num)
    for step in range(200):
        grads = stacked(step, BIG, num)
        before = {k: runner.state_of(k) for k in ("w", "stack")}
        have = runner(grads)
        for k, old in before.items():
            m = (grads[k] + old["error"]).reshape(num, -1, *BIG[k][-2:])
            new, (used, sent) = runner.state_of(k), ("qp" if step % 2 == 0 else "pq")
            basis = np.linalg.qr(old[used][0])[0]
            m = m if used == "q" else np.swapaxes(m, -1, -2)
            want = m.mean(0) @ basis @ np.swapaxes(basis, -1, -2)
            error = m - m @ basis @ np.swapaxes(basis, -1, -2)
            if used == "p":
                want, error = np.swapaxes(want, -1, -2), np.swapaxes(error, -1, -2)
            assert norm(have[k].ravel() - want.ravel()) < 1e-12 * norm(want), (k, step)
            assert norm(new["error"].ravel() - error.ravel()) < 1e-12 * norm(error), (k, step)
            assert norm(new[sent][0] - (m @ basis).mean(0)) < 1e-12 * norm(m @ basis)
            np.testing.assert_array_equal(new[used], old[used])


def test_alternate_powersgd_converges_to_the_best_approximation(x64):
    """With the same gradient in every step."""
    shapes, grads = {"w": (24, 40)}, stacked(0, {"w": (24, 40)}, 2)
    runner = SyncRunner(sync.powersgd(2, alternate=True, error_feedback=False), shapes, 2)
    for _ in range(120):
        have = runner(grads)["w"]
    u, s, v = np.linalg.svd(grads["w"].mean(0))
    assert norm(have - (u[:, :2] * s[:2]) @ v[:2]) < 1e-3 * s[0]


@pytest.mark.parametrize("rule", [optax_ext.flax_attention(), optax_ext.flax_transformer()])
def test_powersgd_factors_the_dims_that_optimizers_factor(rule, x64):
    shapes = {"query/kernel": (24, 4, 8), "out/kernel": (4, 8, 24)}
    runner = SyncRunner(sync.powersgd(2, factoring=rule, min_compression=1.0), shapes, 2)
    assert runner.state_of("query/kernel")["q"].shape == (2, 1, 32, 2)
    assert runner.state_of("out/kernel")["q"].shape == (2, 1, 24, 2)
    q = {k: runner.state_of(k)["q"][0] for k in shapes}
    grads = stacked(0, shapes, 2)
    have = runner(grads)
    for k, (rows, cols) in {"query/kernel": (24, 32), "out/kernel": (32, 24)}.items():
        want, _, _ = reference_powersgd(grads[k].reshape(2, 1, rows, cols), q[k])
        assert norm(have[k] - want.reshape(shapes[k])) < 1e-12 * norm(want)


def test_powersgd_without_warm_start_or_feedback(x64):
    """Without warm start each step draws another Q; without feedback there is no residual."""
    shapes, grads = {"w": (24, 40)}, stacked(0, {"w": (24, 40)}, 2)
    cold = SyncRunner(sync.powersgd(2, warm_start=False, error_feedback=False), shapes, 2)
    assert cold.state_of("w") == {}
    assert norm(cold(grads)["w"] - cold(grads)["w"]) > 1e-3
    forgetful = SyncRunner(sync.powersgd(2, error_feedback=False), shapes, 2)
    assert set(forgetful.state_of("w")) == {"q"}
    for _ in range(60):
        have = forgetful(grads)["w"]
    u, s, v = np.linalg.svd(grads["w"].mean(0))
    assert norm(have - (u[:, :2] * s[:2]) @ v[:2]) < 1e-3 * s[0]  # power iteration converges


# --- Top k ----------------------------------------------------------------------------------------


def largest(x, density):
    """A mask of the largest elements."""
    count = max(1, int(np.ceil(density * x.size)))
    mask = np.zeros(x.size, bool)
    mask[np.argsort(-np.abs(x).ravel(), kind="stable")[:count]] = True
    return mask.reshape(x.shape)


class ReferenceTopK:
    """Gradient dropping, deep gradient compression and EF21 as in their papers, for one array."""

    def __init__(
        self, shape, num, density, feedback="error", momentum=None, nesterov=False, clip=None
    ):
        self.u, self.e = np.zeros((num, *shape)), np.zeros((num, *shape))
        self.density, self.feedback, self.momentum = density, feedback, momentum
        self.nesterov, self.clip = nesterov, clip
        self.step = 0

    def __call__(self, grads):
        num = len(grads)
        steps = [s for s in self.density if s <= self.step]
        density = self.density[max(steps)]
        self.step += 1
        sent = np.zeros_like(grads)
        for i, g in enumerate(grads):
            if self.clip is not None:
                g = g * min(1.0, self.clip / np.sqrt(num) / norm(g))
            if self.feedback == "ef21":
                c = g - self.e[i]
                self.e[i] += c * largest(c, density)
                sent[i] = self.e[i]
                continue
            if self.momentum is None:
                full = self.e[i] + g if self.feedback else g
            elif self.nesterov:
                self.u[i] = self.momentum * (self.u[i] + g)
                full = self.e[i] + self.u[i] + g
            else:
                self.u[i] = self.momentum * self.u[i] + g
                full = self.e[i] + self.u[i]
            mask = largest(full, density)
            sent[i] = full * mask
            self.e[i] = full * ~mask
            self.u[i] = self.u[i] * ~mask
        return sent.mean(0)


TOP_K = {
    "gradient dropping": {},
    "no memory": {"feedback": None},
    "momentum": {"momentum": 0.9},
    "deep gradient compression": {"momentum": 0.9, "nesterov": True, "clip_norm": 3.0},
    "EF21": {"feedback": "ef21"},
}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", TOP_K)
@pytest.mark.parametrize("dims", [None, SHARD_DIMS], ids=["means", "shards"])
def test_top_k_over_hundreds_of_steps(name, dims, x64):
    options, num = TOP_K[name], 4
    densities = {0: 1.0, 2: 0.3, 5: 0.05}
    runner = SyncRunner(sync.top_k(densities, min_size=1, **options), BIG, num, dims)
    options = dict(options)
    clip = options.pop("clip_norm", None)
    references = {k: ReferenceTopK(s, num, densities, clip=clip, **options) for k, s in BIG.items()}
    for step in range(200):
        grads = stacked(step, BIG, num)
        assert_close(runner(grads), {k: references[k](grads[k]) for k in BIG}, 1e-12)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", [name for name in TOP_K if "clip_norm" not in TOP_K[name]])
def test_top_k_of_an_array_beyond_int32_indices(name, x64, monkeypatch):
    """Each of its sections sends its own largest elements."""
    monkeypatch.setattr("sharding.sync._top_k._MAX_SECTION_SIZE", 400)
    shapes, num, densities = {"even": (24, 40), "odd": (7, 131)}, 4, {0: 0.3, 5: 0.05}
    runner = SyncRunner(sync.top_k(densities, min_size=1, **TOP_K[name]), shapes, num)

    def sections(g):
        flat = g.reshape(num, -1)
        flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 3)))
        return np.moveaxis(flat.reshape(num, 3, -1), 1, 0)

    def reference(size):
        return ReferenceTopK((-(-size // 3),), num, densities, **TOP_K[name])

    references = {k: [reference(math.prod(s)) for _ in range(3)] for k, s in shapes.items()}
    for step in range(50):
        grads = stacked(step, shapes, num)
        want = {}
        for k, s in shapes.items():
            pairs = zip(references[k], sections(grads[k]), strict=True)
            flat = np.concatenate([run(part) for run, part in pairs])
            want[k] = flat[: math.prod(s)].reshape(s)
        assert_close(runner(grads), want, 1e-12)


def test_top_k_sends_small_arrays_in_full(x64):
    runner = SyncRunner(sync.top_k(0.01, min_size=100), {"w": (24, 40), "b": (37,)}, 2)
    grads = stacked(0, {"w": (24, 40), "b": (37,)}, 2)
    have = runner(grads)
    np.testing.assert_allclose(have["b"], grads["b"].mean(0), rtol=1e-15)
    assert runner.state_of("b") == ()
    assert 10 <= np.count_nonzero(have["w"]) <= 20


@pytest.mark.parametrize("nesterov", [False, True])
def test_top_k_gives_small_arrays_the_same_momentum(nesterov, x64):
    """So that one learning rate fits all arrays."""
    shapes, num, clip = {"w": (24, 40), "b": (37,)}, 4, 3.0
    options = {"momentum": 0.9, "nesterov": nesterov}
    runner = SyncRunner(sync.top_k(0.1, min_size=100, clip_norm=clip, **options), shapes, num)
    momentum = 0
    for step in range(50):
        grads = stacked(step, shapes, num)
        parts = [g * min(1.0, clip / np.sqrt(num) / norm(g)) for g in grads["b"]]
        g = np.mean(parts, 0)
        momentum = 0.9 * (momentum + g) if nesterov else 0.9 * momentum + g
        have = runner(grads)["b"]
        want = momentum + g if nesterov else momentum
        assert norm(have - want) < 1e-13 * norm(want)


def test_approximate_top_k_has_a_residual_for_missed_elements(x64):
    shapes = {"w": (64, 80)}
    runner = SyncRunner(sync.top_k(0.1, approximate=True, min_size=1), shapes, 2)
    total = sent = 0.0
    for step in range(5):
        grads = stacked(step, shapes, 2)
        total, sent = total + grads["w"].mean(0), sent + runner(grads)["w"]
    residual = runner.state_of("w")["error"].mean(0)
    assert norm(sent + residual - total) < 1e-13 * norm(total)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.floats(0.01, 1.0),
    st.integers(0, 99),
)
def test_sent_elements_and_residuals_sum_to_all_gradients(rows, cols, num, density, seed):
    shapes = {"w": (rows, cols)}
    with jax.enable_x64(True):
        runner = SyncRunner(sync.top_k(density, min_size=1), shapes, num)
        total, sent = np.zeros((rows, cols)), np.zeros((rows, cols))
        for step in range(4):
            grads = stacked(seed + step, shapes, num)
            total, sent = total + grads["w"].mean(0), sent + runner(grads)["w"]
            residual = runner.state_of("w")["error"].mean(0)
            assert norm(sent + residual - total) <= 1e-13 * norm(total)


# --- Quantized ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("norm_name", ["max", "l2"])
def test_codes_are_the_nearest_levels(bits, norm_name):
    levels, block = 2 ** (bits - 1) - 1, 32
    x = np.random.default_rng(bits).normal(size=(3, 100)) * 10.0 ** np.arange(-2, 1)[:, None]
    codes, scales = quantize(jnp.asarray(x, jnp.float32), bits, block, norm_name)
    assert codes.dtype == (jnp.int8 if bits == 8 else jnp.uint8)
    assert codes.shape == (3, 128 * bits // 8)
    assert scales.shape == (3, 4)
    have = np.asarray(dequantize(codes, scales, bits, block))
    blocks = np.pad(x, ((0, 0), (0, 28))).reshape(3, 4, block)
    size = np.abs(blocks).max(-1) if norm_name == "max" else np.linalg.norm(blocks, axis=-1)
    level = (size / levels)[..., None]
    want = np.round(blocks / level) * level
    np.testing.assert_allclose(have.reshape(want.shape), want, rtol=1e-5, atol=1e-6 * size.max())
    assert np.abs(have.reshape(want.shape) - blocks).max() <= 0.501 * level.max()


def bernstein(variance, draws, elements, chance=1e-6):
    """Bernstein's bound: the means of bounded draws exceed it at any element with this chance."""
    bits = np.log(2 * elements / chance)
    return (bits / 3 + np.sqrt(bits**2 / 9 + 2 * bits * draws * variance)) / draws


@pytest.mark.parametrize(("bits", "norm_name"), [(8, "max"), (8, "l2"), (4, "max"), (4, "l2")])
def test_stochastic_codes_are_unbiased(bits, norm_name):
    """Fails by chance once in a million runs."""
    draws, size, levels = 2000, 512, 2 ** (bits - 1) - 1
    x = np.random.default_rng(1).normal(size=(1, size)).astype(np.float32)
    encode = jax.jit(
        jax.vmap(lambda key: dequantize(*quantize(x, bits, size, norm_name, key), bits, size)[0])
    )
    found = np.asarray(encode(jax.random.split(jax.random.key(0), draws)), np.float64)
    level = (np.abs(x).max() if norm_name == "max" else np.linalg.norm(x)) / levels
    share = np.abs(x[0]) / level % 1
    most = bernstein(share * (1 - share), draws, size) * level
    assert (np.abs(found.mean(0) - x[0]) < most + 1e-6 * level).all()
    variance = np.mean(np.sum((found - x) ** 2, 1))
    if norm_name == "l2":  # the bound of the QSGD paper
        bound = min(size / levels**2, np.sqrt(size) / levels) * np.sum(x**2)
        assert variance < bound
    assert variance > 0


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dims", [None, SHARD_DIMS], ids=["means", "shards"])
def test_quantized_means(bits, rounding, dims, x64):
    """The error of an element is at most one level of its block, two levels for a full mean."""
    num, levels = 8, 2 ** (bits - 1) - 1
    runner = SyncRunner(
        sync.qsgd(bits, block_size=16, rounding=rounding, min_size=1), BIG, num, dims
    )
    for step in range(5):
        grads = stacked(step, BIG, num)
        have = runner(grads)
        for k, g in grads.items():
            level = np.abs(g).reshape(num, -1).max(1).mean() / levels
            twice = dims is None or not dims[k]
            most = (0.51 if rounding == "nearest" else 1.01) * level * (2.1 if twice else 1)
            assert np.abs(have[k] - g.mean(0)).max() <= most, (k, step)
            assert norm(have[k] - g.mean(0)) > 0


def test_quantized_means_are_unbiased(x64):
    """Over 400 syncs of one gradient; nearest rounding stays biased.

    Fails by chance once in a million runs, if the spread is that of these 400.
    """
    shapes, num = {"w": (16, 24)}, 4
    grads = stacked(0, shapes, num)
    want = grads["w"].mean(0)
    spread = {}
    for rounding in ("stochastic", "nearest"):
        runner = SyncRunner(
            sync.qsgd(4, block_size=128, rounding=rounding, min_size=1), shapes, num
        )
        found = np.stack([runner(grads)["w"] for _ in range(400)])
        spread[rounding] = norm(found.mean(0) - want)
        if rounding == "stochastic":
            level = found.max(0) - found.min(0) + 1e-6  # nearly that of one draw
            most = bernstein((found.std(0) / level) ** 2, 400, want.size) * level
            assert (np.abs(found.mean(0) - want) < most + 1e-6).all()
    assert spread["nearest"] > 5 * spread["stochastic"]


def test_quantized_zeros_and_arrays_of_few_elements(x64):
    runner = SyncRunner(sync.qsgd(4, min_size=1), {"w": (3,), "e": (1, 1)}, 8)
    have = runner({"w": np.zeros((8, 3)), "e": np.arange(8.0).reshape(8, 1, 1)})
    np.testing.assert_array_equal(have["w"], 0)
    np.testing.assert_allclose(have["e"], 3.5, rtol=1e-6)


# --- Contraction of biased compressors ------------------------------------------------------------

DRAWN = {
    "gaussian": lambda rng, size: rng.normal(size=size),
    "student t3": lambda rng, size: rng.standard_t(3, size=size),
    "log-normal": lambda rng, size: rng.lognormal(0, 2, size=size) * rng.choice([-1, 1], size=size),
}


def lost(compress, name, size, draws=64):
    """The fraction of the squared norm that compression loses, (draws,)."""
    rng = np.random.default_rng(0)
    xs = [DRAWN[name](rng, size).astype(np.float32) for _ in range(draws)]
    return np.array([norm(compress(x) - x) ** 2 / norm(x) ** 2 for x in xs])


def coded(bits, block):
    def compress(x):
        codes, scales = quantize(jnp.asarray(x.reshape(1, -1)), bits, block)
        return np.asarray(dequantize(codes, scales, bits, block))[0, : x.size].reshape(x.shape)

    return compress


def synced(method, shape):
    runner = SyncRunner(method, {"w": shape}, 1, dtype=jnp.float32)
    start = runner.state

    def compress(x):
        runner.state = start
        return runner({"w": x[None]})["w"]

    return compress


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize(("bits", "block", "most"), [(8, 256, 4e-4), (4, 128, 0.054)])
def test_codes_contract(bits, block, most, name):
    """Nearest codes lose less than half a level of each element, whatever the numbers."""
    found = lost(coded(bits, block), name, (16, 1024))
    assert (found > 0).all()
    # Half a level of a block's largest element, which is at most its norm.
    assert (found <= block / (2 * (2 ** (bits - 1) - 1)) ** 2).all()
    if name == "gaussian":
        assert found.max() < most


@pytest.mark.parametrize(("name", "mean"), [("gaussian", 0.917), ("student t3", 0.643)])
def test_top_k_contracts(name, mean):
    """By k of n elements at least for any numbers, and by a known mean for these.

    The expected means come from other draws, to three digits. Five standard errors are exceeded by
    chance once in a million runs.
    """
    size = (64, 1024)
    found = lost(synced(sync.top_k(0.01, min_size=1), size), name, size, draws=24)
    assert (found <= 1 - np.ceil(0.01 * 65536) / 65536).all()
    assert abs(found.mean() - mean) < 5 * found.std() / np.sqrt(found.size) + 1e-3


def test_top_k_loses_little_of_heavy_tails():
    size = (64, 1024)
    found = lost(synced(sync.top_k(0.01, min_size=1), size), "log-normal", size, draws=8)
    assert 0 < found.max() < 0.2


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("alternate", [False, True])
def test_powersgd_contracts(rank, alternate):
    """A projection never increases the norm. A random one of the rows preserves rank / rows.

    One that was fitted to the matrix preserves more. With ``alternate`` the first one is random,
    and preserves rank / columns. Fails by chance once in a million runs.
    """
    method = sync.powersgd(rank, alternate=alternate, min_compression=1.0, warm_start=True)
    found = lost(synced(method, (32, 48)), "gaussian", (32, 48), draws=40)
    assert (found < 1).all()
    noise = 5 * found.std() / np.sqrt(found.size)
    if alternate:
        assert abs(found.mean() - (1 - rank / 48)) < noise
    else:
        assert found.mean() + noise < 1 - rank / 32
