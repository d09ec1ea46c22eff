"""Every sync method against NumPy in float64 over many steps, and the bytes that it sends."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_ext import flax_transformer
from sharding import sync
from sharding.collectives._reduce_scatter import dequantize, quantize
from sharding.plan.audit._program_collectives import wire_bytes

from .harness import SyncRunner, assert_close, norm, stacked

pytestmark = pytest.mark.usefixtures("x64")
NUM, NUM_STEPS, RANK_3 = 4, 24, 3
# No number of devices divides 37, which is a small array to some of the methods.
BIG = {"w": (24, 40), "stack": (3, 16, 20), "b": (37,)}
SHARD_DIMS = {"w": -1, "stack": -2, "b": 0}
MATRICES = ("w", "stack")
BY_STEP = {0: 1.0, 3: 0.05}
DGC = {"momentum": 0.9, "clip_norm": 3.0}
TOP_K = {
    "gradient dropping": {"density": 0.05},
    "no memory": {"density": 0.05, "feedback": None},
    "momentum": {"density": BY_STEP, "momentum": 0.9, "min_size": 100},
    "deep gradient compression": {"density": BY_STEP, "min_size": 100} | DGC,
    "EF21": {"density": 0.05, "feedback": "ef21"},
}
QSGD = {  # of which one is quantized again for full means, and others compile slowly
    "qsgd 4 nearest": (4, "nearest"),
    "qsgd 8 nearest": (8, "nearest"),
    "qsgd 8 stochastic": (8, "stochastic"),
}
BLOCK = 16  # elements per scale
RULES = {
    "dense": sync.dense(),
    "powersgd": sync.powersgd(RANK_3, min_compression=1.0),
    "gradzip": sync.gradzip(RANK_3, min_compression=1.0),
    **{name: sync.top_k(**({"min_size": 1} | kw)) for name, kw in TOP_K.items()},
    **{
        name: sync.qsgd(bits, block_size=BLOCK, rounding=rounding, min_size=1)
        for name, (bits, rounding) in QSGD.items()
    },
}
# Of those that share the slicing of a full mean one is enough.
SHARDED = ("dense", "deep gradient compression", "qsgd 8 nearest", "qsgd 8 stochastic")
MEANS = tuple(rule for rule in RULES if rule not in SHARDED[2:])


class Run:
    """Many steps of methods by name: the means, and the states before and after each step."""

    def __init__(self, rules, dims):
        self.dims = dims
        # A program each: XLA:CPU runs independent collectives in any order, and may wait for ever.
        self.runners = {rule: SyncRunner(RULES[rule], BIG, NUM, dims) for rule in rules}
        self.grads, self.means, self.states = [], [], [self.state()]
        for step in range(NUM_STEPS):
            grads = stacked(step, BIG, NUM)
            means = {rule: runner(grads) for rule, runner in self.runners.items()}
            self.grads.append(grads)
            self.means.append({f"{r}/{k}": x for r, of in means.items() for k, x in of.items()})
            self.states.append(self.state())

    def state(self):
        """Of each array, by its path."""
        found = {rule: jax.device_get(runner.state) for rule, runner in self.runners.items()}
        return {f"{r}/{k}": x for r, of in found.items() for k, x in of.arrays.items()}

    def steps(self, rule, names=tuple(BIG)):
        """Of each step: gradients, means, and states before and after, by name."""

        def of_rule(tree):
            return {k: tree[f"{rule}/{k}"] for k in names}

        for i, grads in enumerate(self.grads):
            yield (
                {k: grads[k] for k in names},
                *map(of_rule, (self.means[i], self.states[i], self.states[i + 1])),
            )


@functools.cache
def run_of(sharded):
    """Means, or shards of them."""
    return Run(SHARDED, SHARD_DIMS) if sharded else Run(MEANS, None)


def rules(*names):
    """Parameters ``(rule, sharded)``: of full means, and of shards."""
    cases = [(rule, sharded) for sharded in (False, True) for rule in names]
    cases = [case for case in cases if case[0] in (SHARDED if case[1] else MEANS)]
    return pytest.mark.parametrize(("rule", "sharded"), cases)


@rules("dense")
def test_dense(rule, sharded):
    for grads, means, *_ in run_of(sharded).steps(rule):
        assert_close(means, {k: g.mean(0) for k, g in grads.items()}, 1e-15)


@pytest.mark.parametrize("sharded", [False, True], ids=["means", "shards"])
def test_bytes_on_the_wire(sharded):
    """Exactly those of the formulas, and flags of gradients that are not finite."""
    run = run_of(sharded)
    share, sizes = (NUM - 1) / NUM, {k: math.prod(s) for k, s in BIG.items()}
    dense = {k: share * 8 * n * (1 if run.dims and run.dims[k] else 2) for k, n in sizes.items()}
    small, both, larger = 2 * share * 8 * sizes["b"], 0, 0
    for k in MATRICES:
        *count, rows, cols = BIG[k]
        one_row = 2 * share * 8 * RANK_3 * math.prod(count)
        both += one_row * (rows + cols)
        larger += one_row * max(rows, cols)  # the branch that sends most

    def largest(density, names):
        return sum((NUM - 1) * math.ceil(density * sizes[k]) * 12 for k in names)

    def codes(bits):
        found = 0
        for k, n in sizes.items():
            padded = -(-math.ceil(n / NUM) // BLOCK) * BLOCK
            one = (NUM - 1) * (padded * bits / 8 + 4 * padded / BLOCK)
            found += one * (1 if run.dims and run.dims[k] else 2)
        return found

    want = {"dense": sum(dense.values())}
    want |= {"powersgd": both + small, "gradzip": larger + small}
    for name, options in TOP_K.items():
        names = MATRICES if "min_size" in options else BIG
        density = 1.0 if options["density"] is BY_STEP else options["density"]
        want[name] = largest(density, names) + (small if "min_size" in options else 0)
    want |= {name: codes(bits) for name, (bits, _) in QSGD.items()}
    # Of small arrays with momentum too; of none that is sent in full without a state.
    flags = dict.fromkeys(RULES, 3) | {"dense": 0, "powersgd": 2, "gradzip": 2}
    total = sum(want[rule] + 2 * share * 4 * flags[rule] for rule in run.runners)
    sent = sum(wire_bytes(runner.compiled) for runner in run.runners.values())
    assert sent == pytest.approx(total, rel=1e-12)


# --- PowerSGD -------------------------------------------------------------------------------------


def reference_powersgd(m, q):
    """One step of the paper: mean, new Q, and the residual in the form of ``powersgd``."""
    q = np.linalg.qr(q)[0]
    p = np.linalg.qr(np.sum(m @ q, 0))[0]
    own = np.swapaxes(m, -1, -2) @ p
    q = own.mean(0)
    return p @ np.swapaxes(q, -1, -2), q, m - p @ np.swapaxes(own, -1, -2)


@rules("powersgd")
def test_powersgd(rule, sharded):
    """Each step from the state of ``powersgd``, since rounding errors grow over steps."""
    run = run_of(sharded)
    for grads, means, before, after in run.steps(rule, MATRICES):
        for k, old in before.items():
            m = (grads[k] + old["error"]).reshape(NUM, -1, *BIG[k][-2:])
            want, q, error = reference_powersgd(m, old["q"][0])
            new = after[k]
            assert norm(means[k] - want.reshape(BIG[k])) < 1e-12 * norm(want)
            assert norm(new["q"] - q) < 1e-12 * norm(new["q"])
            assert set(new) == {"q", "error"}
            assert norm(new["error"] - error.reshape(new["error"].shape)) < 1e-12 * norm(error)
    # Residuals stay bounded; those of the usual form would double.
    sizes = [norm(run.states[step]["powersgd/w"]["error"]) for step in (10, NUM_STEPS)]
    assert sizes[1] < 1.3 * sizes[0]
    for grads, means, *_ in run.steps(rule, ("b",)):
        assert_close(means, {"b": grads["b"].mean(0)}, 1e-14)


def solved(m, fixed):
    """The least-squares solution of m = x fixed^T."""
    return np.linalg.lstsq(fixed, m.T, rcond=None)[0].T


@rules("gradzip")
def test_gradzip(rule, sharded):
    """Alternating least squares, by solvers of NumPy: one factor is fixed, the other is solved.

    A device's own solution is of its own matrix; their mean is that of all.
    """
    run = run_of(sharded)
    for step, (grads, means, before, after) in enumerate(run.steps(rule, MATRICES)):
        even = step % 2 == 0
        for k, old in before.items():
            m = (grads[k] + old["error"]).reshape(NUM, -1, *BIG[k][-2:])
            m = m if even else np.swapaxes(m, -1, -2)
            fixed = np.linalg.qr(old["q" if even else "p"][0])[0]
            own = np.array([[solved(x, f) for x, f in zip(of, fixed, strict=True)] for of in m])
            across = np.swapaxes(fixed, -1, -2)
            want, error = own.mean(0) @ across, m - own @ across
            want, error = (x if even else np.swapaxes(x, -1, -2) for x in (want, error))
            new = after[k]
            assert norm(means[k] - want.reshape(BIG[k])) < 1e-12 * norm(want)
            assert norm(new["p" if even else "q"] - own.mean(0)) < 1e-12 * norm(own)
            assert norm(new["error"] - error.reshape(new["error"].shape)) < 1e-12 * norm(error)
    sizes = [norm(run.states[step]["gradzip/w"]["error"]) for step in (10, NUM_STEPS)]
    assert sizes[1] < 1.3 * sizes[0]


def test_powersgd_of_special_gradients():
    """Low ranks are exact, each matrix of a stack by itself; zeros stay zero.

    A rule that looks at all parameters sees those of the sync: "blocks" are no stack.
    """
    rng = np.random.default_rng(0)
    rules = {
        "low": sync.powersgd(2, min_compression=1.0),
        "zero": sync.powersgd(4, min_compression=1.0),
        "blocks": sync.powersgd(2, min_compression=1.0, factoring=flax_transformer()),
    }
    query, out = (f"blocks/b/{name}/kernel" for name in ("query", "out"))
    shapes = {query: (24, 4, 5), out: (4, 5, 24), "low": (3, 24, 20), "zero": (24, 40)}
    grads = stacked(0, shapes, 2)
    low = rng.normal(size=(2, 24, 2)) @ rng.normal(size=(2, 20))  # rank 2, as 24 x (4 * 5)
    grads[query] = low.reshape(2, 24, 4, 5)
    grads[out] = low.swapaxes(1, 2).reshape(2, 4, 5, 24)
    scale = np.array([1e-4, 1.0, 1e4])[:, None, None]
    grads["low"] = scale * (rng.normal(size=(2, 3, 24, 2)) @ rng.normal(size=(3, 2, 20)))
    grads["zero"] = np.zeros((2, 24, 40))
    runner = SyncRunner(sync.by_path(rules), shapes, 2)
    runner(grads)
    have = runner(grads)

    want = grads["low"].mean(0)
    for i in range(3):
        assert norm(have["low"][i] - want[i]) < 1e-12 * norm(want[i])
    for name in (query, out):
        assert norm(have[name] - grads[name].mean(0)) < 1e-12 * norm(grads[name].mean(0))

    np.testing.assert_array_equal(have["zero"], 0)
    grads["zero"][:, 3, 5] = [1.0, 3.0]
    for _ in range(3):  # Q is zero after zeros
        runner(grads)
    assert norm(np.mean(runner.state[1].arrays["zero"]["error"], 0)) < 1e-12


# --- Top k ----------------------------------------------------------------------------------------


def largest(x, density):
    """A mask of the largest elements."""
    count = max(1, int(np.ceil(density * x.size)))
    mask = np.zeros(x.size, bool)
    mask[np.argsort(-np.abs(x).ravel(), kind="stable")[:count]] = True
    return mask.reshape(x.shape)


class ReferenceTopK:
    """Gradient dropping, deep gradient compression and EF21 as in their papers, for one array.

    An array below ``min_size`` has momentum alone.
    """

    def __init__(self, shape, density, min_size=1, **options):
        self.u, self.e = np.zeros((NUM, *shape)), np.zeros((NUM, *shape))
        self.feedback = options.get("feedback", "error")
        self.momentum = options.get("momentum")
        self.clip, self.small = options.get("clip_norm"), math.prod(shape) < min_size
        self.densities = density if isinstance(density, dict) else {0: density}
        self.step = 0

    def __call__(self, grads):
        density = self.densities[max(s for s in self.densities if s <= self.step)]
        self.step += 1
        sent = np.zeros_like(grads)
        for i, g in enumerate(grads):
            if self.clip is not None:
                g = g * min(1.0, self.clip / np.sqrt(NUM) / norm(g))
            if self.feedback == "ef21":
                c = g - self.e[i]
                self.e[i] += c * largest(c, density)
                sent[i] = self.e[i]
                continue
            if self.momentum is None:
                full = self.e[i] + g if self.feedback else g
            else:
                self.u[i] = self.momentum * self.u[i] + g
                full = self.e[i] + self.u[i]
            mask = np.ones(g.shape, bool) if self.small else largest(full, density)
            sent[i] = full * mask
            if not self.small:
                self.e[i], self.u[i] = full * ~mask, self.u[i] * ~mask
        return sent.mean(0)


@rules(*TOP_K)
def test_top_k(rule, sharded):
    references = {k: ReferenceTopK(s, **TOP_K[rule]) for k, s in BIG.items()}
    for grads, means, *_ in run_of(sharded).steps(rule):
        assert_close(means, {k: references[k](grads[k]) for k in BIG})


def test_top_k_of_an_array_beyond_int32_indices(monkeypatch):
    """Each of its sections sends its own largest elements."""
    # Of the function itself: by its name, a module may be one that doctests imported anew.
    monkeypatch.setitem(sync.top_k.__globals__, "_MAX_SECTION_SIZE", 400)
    options = {name: TOP_K[name] | {"min_size": 1} for name in ("momentum", "EF21")}
    shapes = {"momentum": (24, 40), "EF21": (7, 131)}
    rules = {name: sync.top_k(**kw) for name, kw in options.items()}
    runner = SyncRunner(sync.by_path(rules), shapes, NUM)

    def sections(g):
        flat = g.reshape(NUM, -1)
        flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 3)))
        return np.moveaxis(flat.reshape(NUM, 3, -1), 1, 0)

    references = {
        k: [ReferenceTopK((-(-math.prod(s) // 3),), **options[k]) for _ in range(3)]
        for k, s in shapes.items()
    }
    for step in range(12):
        grads = stacked(step, shapes, NUM)
        want = {}
        for k, s in shapes.items():
            parts = zip(references[k], sections(grads[k]), strict=True)
            flat = np.concatenate([reference(part) for reference, part in parts])
            want[k] = flat[: math.prod(s)].reshape(s)
        assert_close(runner(grads), want)


def test_zeros_and_narrow_means():
    shapes = {"zero": (3, 1), "narrow": (7, 9)}
    rules = {"zero": sync.qsgd(4, min_size=1), "narrow": sync.dense("bfloat16")}
    runner, grads = SyncRunner(sync.by_path(rules), shapes, 3), stacked(0, shapes, 3)
    assert "bf16[7,9] = psum" in runner.jaxpr()
    grads["zero"][:] = 0.0
    have = runner(grads)
    np.testing.assert_array_equal(have["zero"], 0)
    rounded = grads["narrow"].astype(jnp.bfloat16).astype(float).mean(0)
    assert norm(have["narrow"] - rounded) < 2**-8 * norm(rounded)


# --- Quantized ------------------------------------------------------------------------------------


def nearest(x, bits, block=BLOCK):
    """Rows of x rounded to the nearest levels of their blocks, and a level for each element."""
    levels = 2 ** (bits - 1) - 1
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(len(x), -1, block)
    size = np.abs(blocks).max(-1)
    level = np.broadcast_to((size / levels)[..., None], blocks.shape)
    rounded = np.round(blocks / np.where(level == 0, 1, level)) * level
    return (y.reshape(len(x), -1)[:, : x.shape[1]] for y in (rounded, level))


def quantized_mean(g, bits, dim, block=BLOCK):
    """Of gradients (devices, ...): the mean from nearest codes, and a bound of its error."""
    if dim:  # shards along the dim, one for each device
        parts = np.stack(np.split(g, NUM, g.ndim + dim), 0)  # (receivers, devices, ...)
        pairs = [nearest(part.reshape(NUM, -1), bits, block=block) for part in parts]
        means = [[y.mean(0).reshape(parts.shape[2:]) for y in pair] for pair in pairs]
        return [np.concatenate(each, g.ndim - 1 + dim) for each in zip(*means, strict=True)]
    size = math.prod(g.shape[1:])
    flat = np.pad(g.reshape(NUM, -1), ((0, 0), (0, -size % NUM)))
    pairs = [nearest(part, bits) for part in np.split(flat, NUM, 1)]
    mean, level = np.array([[y.mean(0) for y in pair] for pair in pairs]).swapaxes(0, 1)
    again, second = nearest(mean, bits)
    return [y.ravel()[:size].reshape(g.shape[1:]) for y in (again, level + second)]


@rules(*QSGD)
def test_quantized_means(rule, sharded):
    """Those of NumPy; with stochastic rounding at most one level off, two for a full mean."""
    run, (bits, rounding) = run_of(sharded), QSGD[rule]
    for grads, means, *_ in list(run.steps(rule))[:20]:
        for k, g in grads.items():
            want, level = quantized_mean(g, bits, run.dims[k] if run.dims else 0)
            if rounding == "nearest":
                off = np.abs(means[k] - want)
                # Scales are float32, whose rounding may decide between two levels.
                assert np.mean(off <= 2e-6 * np.abs(g).max()) > 0.999, k
                assert np.all(off <= 1.01 * level)
            else:
                off = np.abs(means[k] - g.mean(0))
                assert np.all(off <= 1.3 * level + 1e-6 * np.abs(g).max()), k
                assert off.max() > 0.1 * level.max()


def bernstein(variance, draws, elements, chance=1e-6):
    """Bernstein's bound: the means of bounded draws exceed it at any element with this chance."""
    bits = np.log(2 * elements / chance)
    return (bits / 3 + np.sqrt(bits**2 / 9 + 2 * bits * draws * variance)) / draws


def test_the_noise_of_quantized_means():
    """Over 200 syncs of one gradient it has a mean of zero, and it differs between devices.

    Fails by chance once in a million runs, if the spread is that of these 200.
    """
    shapes = {"w": (16, 24), "same": (16, 24)}
    runner = SyncRunner(sync.qsgd(4, block_size=96, min_size=1), shapes, NUM, {"w": 0, "same": -1})
    grads = stacked(0, shapes, NUM)
    grads["same"][:] = grads["same"][:1]
    found = [runner(grads) for _ in range(200)]
    for k in shapes:
        means, want = np.stack([x[k] for x in found]), grads[k].mean(0)
        level = means.max(0) - means.min(0) + 1e-6  # nearly that of one draw
        most = bernstein((means.std(0) / level) ** 2, 200, want.size) * level
        assert (np.abs(means.mean(0) - want) < most + 1e-6).all(), k
    # Means of equal codes would be levels, as each code is.
    _, level = quantized_mean(grads["same"], 4, -1, block=96)
    steps = found[0]["same"] / level
    assert np.mean(np.abs(steps - np.round(steps)) > 0.2) > 0.3


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_what_is_not_finite_are_nan(bits):
    """Of a block, also of many, where a maximum on CPUs ignores NaN."""
    shape, block = (8, 4096), 512
    for place, bad in itertools.product((0, 1, block - 1), (np.nan, np.inf, -np.inf)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        x[3, place] = bad
        have = np.asarray(roundtrip(x, bits, block))
        assert np.isnan(have[3, :block]).all()
        assert np.isfinite(have).sum() == x.size - block


@functools.partial(jax.jit, static_argnums=(1, 2))
def roundtrip(x, bits, block):
    return dequantize(*quantize(x, bits, block), bits, block)
