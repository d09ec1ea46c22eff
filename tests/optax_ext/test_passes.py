"""Every form of a pass is the same mathematics; what the programs read is in tests/sharding."""

import contextlib
import functools

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Factoring, _matrix_passes, _sums_kernel, kernels

from . import dims, references, traces

# id -> the platform whose form is taken, and into how many blocks it divides a first dim.
FORMS = {
    "in blocks": ("cpu", lambda shape: shape[0]),
    "in fewer blocks": ("cpu", lambda shape: next(n for n in (3, 2, 1) if shape[0] % n == 0)),
    "one by one": ("cpu", lambda shape: 1),
    "on a GPU": ("cuda", lambda shape: 1),
    "by a kernel": ("cuda", lambda shape: 1),
}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Arrays of any size take this form."""
    with use(monkeypatch, request.param):
        yield request.param


@contextlib.contextmanager
def use(monkeypatch, name):
    """The form is chosen while a kernel is traced: no trace may outlive it."""
    platform, blocks = FORMS[name]
    jax.clear_caches()
    monkeypatch.setattr(_matrix_passes, "_MIN_SIZE", 0)
    monkeypatch.setattr(_matrix_passes, "_num_blocks", blocks)
    monkeypatch.setattr(
        jax.lax,
        "platform_dependent",
        lambda *args, default, **forms: forms.get(platform, default)(*args),
    )
    kernel = contextlib.ExitStack()
    if name == "by a kernel":
        kernel.enter_context(_matrix_passes.implemented_by("pallas"))
        kernel.enter_context(kernels.interpreted())
        monkeypatch.setattr(_matrix_passes, "implemented_by", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(_sums_kernel, "_ROWS", 8)  # several tiles
        monkeypatch.setattr(_sums_kernel, "_COLUMNS", 4)
    try:
        with kernel:
            yield
    finally:
        monkeypatch.undo()
        jax.clear_caches()


# --- One pass -----------------------------------------------------------------------------------


def both(array, args):
    x = (array - args["rows"] * args["cols"]) ** 2 + args["same"] + args["scalar"]
    return x, 0.9 * array + args["scalar"] * args["same"]


def operands(shape, seed=0):
    rng = np.random.default_rng(seed)
    ndim = len(shape)
    edge = [1] * ndim
    rows = tuple(shape[d] if d == 0 else 1 for d in range(ndim))
    cols = tuple(shape[d] if d == ndim - 1 else 1 for d in range(ndim))
    sizes = {"rows": rows, "cols": cols, "same": shape, "scalar": edge}
    return rng.normal(size=shape), {k: rng.normal(size=s) for k, s in sizes.items()}


@pytest.mark.slow(keep=20)
@pytest.mark.usefixtures("x64", "form")
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    ("shape", "over"),
    [
        ((12, 5), [(1,), (0,)]),
        ((12, 5), [(0,), (1,)]),
        ((1, 7), [(1,), (0,)]),
        ((7, 1), [(1,), (0,)]),
        ((6, 4, 5), [(1, 2), (0, 1)]),
        ((6, 4, 5), [(2,), (1,)]),
        ((6, 4, 5), [(0,), (2,)]),
        ((128, 3), [(1,), (0,)]),  # more rows than a GPU adds up first
    ],
)
def test_a_sweep_is_its_definition(shape, over, new):
    array, args = operands(shape)

    def fn(array, args):
        x, value = both(array, args)
        return x, value if new else None

    means, found = jax.jit(lambda a, b: _matrix_passes.sweep(fn, a, b, *over))(array, args)
    x, value = both(array, args)
    for have, dims_ in zip(means, over, strict=True):
        np.testing.assert_allclose(have, np.mean(x, axis=dims_), rtol=1e-13)
    if new:
        np.testing.assert_allclose(found, value, rtol=1e-15)
    else:
        assert found is None


def test_kernels_are_only_where_they_are_requested():
    array = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def is_used(implementation, array):
        with _matrix_passes.implemented_by(implementation), kernels.interpreted():
            return "pallas_call" in str(
                jax.make_jaxpr(
                    lambda a: _matrix_passes.sweep(lambda a, _: (a, None), a, (), (1,), (0,))
                )(array)
            )

    assert is_used("pallas", array)
    assert not is_used("xla", array)
    assert not is_used("pallas", jax.ShapeDtypeStruct((65536, 32768), jnp.float32))  # 2^31
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert not is_used("pallas", jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=place))


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("form")
def test_squares_of_1e18_fit_into_float32():
    array = jnp.full((600, 900), 1e18, jnp.float32)
    means, _ = _matrix_passes.sweep(lambda a, _: (jnp.square(a), None), array, (), (1,), (0,))
    for have in means:
        np.testing.assert_allclose(have, np.full(have.shape, 1e36, np.float32), rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -1.5, np.nan, -np.nan, np.inf, -np.inf, 1e-40])
def test_the_zero_of_any_value_is_zero(value):
    assert int(jax.jit(_matrix_passes._zero)(jnp.full((3, 2), value, jnp.float32))) == 0


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((4096, 4096), 32),
        ((32000, 4096), 250),
        ((50257, 768), 29),
        ((3, 3, 512, 512), 3),
        ((768, 768), 2),
        ((12, 64, 768), 2),
    ],
)
def test_blocks_cut_the_first_dim_into_equal_parts(shape, blocks):
    assert _matrix_passes._num_blocks(shape) == blocks


@pytest.mark.parametrize("shape", [(40009, 1000), (37, 5), (1, 2**22)])
def test_what_has_no_fitting_divisor_is_not_cut(shape):
    assert _matrix_passes._num_blocks(shape) == 1


# --- Both optimizers, each form against the papers in NumPy ---------------------------------------


@pytest.mark.slow(keep=16)
@pytest.mark.usefixtures("x64", "form")
@pytest.mark.parametrize("case", [c for c, (_, f) in dims.CASES.items() if f.factored])
def test_came_equals_the_reference(case):
    shape, factoring = dims.CASES[case]
    want = references.Came(shape, **dims.as_kwargs(factoring))
    traces.compare_to_reference(
        optax_ext.scale_by_came(factoring=factoring), want, shape, num_steps=200
    )


@pytest.mark.usefixtures("x64", "form")
@pytest.mark.parametrize("case", ["plain matrix", "columns before rows", "everything at once"])
def test_adafactor_equals_the_reference(case):
    shape, factoring = dims.CASES[case]
    want = references.Adafactor(shape, **dims.as_kwargs(factoring))
    traces.compare_to_reference(
        optax_ext.scale_by_adafactor(factoring=factoring), want, shape, num_steps=200
    )


OPTIONS = {
    "no clipping": ({"clipping_threshold": None}, {"clip": None}),
    "debiased": ({"debias_instability": True}, {"debias": True}),
    "bfloat16 momentum": ({"mu_dtype": "bfloat16"}, {"mu_dtype": ml_dtypes.bfloat16}),
    "all of them": (
        {"clipping_threshold": None, "debias_instability": True, "mu_dtype": "bfloat16"},
        {"clip": None, "debias": True, "mu_dtype": ml_dtypes.bfloat16},
    ),
}


@pytest.mark.slow(keep=13)
@pytest.mark.usefixtures("x64", "form")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", ["plain matrix", "batch and stacked"])
def test_options_equal_the_reference(option, case):
    shape, factoring = dims.CASES[case]
    options, reference = OPTIONS[option]
    want = references.Came(shape, **dims.as_kwargs(factoring), **reference)
    tx = optax_ext.scale_by_came(factoring=factoring, **options)
    traces.compare_to_reference(tx, want, shape, num_steps=60)


@pytest.mark.parametrize("name", FORMS)
def test_any_shape_and_factoring_equals_the_reference(name, monkeypatch):
    @hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
    @hypothesis.given(dims.shapes_and_factorings())
    def check(case):
        shape, factoring = case
        want = references.Came(shape, **dims.as_kwargs(factoring))
        tx = optax_ext.scale_by_came(factoring=factoring)
        with jax.enable_x64(True), use(monkeypatch, name):
            traces.compare_to_reference(tx, want, shape, num_steps=4)

    check()


# --- Under transformations ------------------------------------------------------------------------


def scaled_by_came():
    tx = optax_ext.scale_by_came(factoring=Factoring((0,), (1,)))

    def update(g):
        out, _ = tx.update(g, tx.init(jnp.zeros_like(g)))
        return out

    return update


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64", "form")
def test_it_can_be_mapped_and_differentiated():
    g = jnp.asarray(np.random.default_rng(1).normal(size=(3, 6, 5)))
    update = jax.jit(scaled_by_came())
    np.testing.assert_allclose(jax.vmap(update)(g), [update(x) for x in g], rtol=1e-12)
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(6, 5)))

    @jax.jit
    def loss(x):
        return jnp.sum(update(x) * weights)

    slope = jax.grad(loss)(g[0])
    step = 1e-6
    for place in [(0, 0), (3, 2), (5, 4)]:
        bump = jnp.zeros_like(g[0]).at[place].set(step)
        want = (loss(g[0] + bump) - loss(g[0] - bump)) / (2 * step)
        np.testing.assert_allclose(slope[place], want, rtol=1e-5, atol=1e-8)


@pytest.mark.usefixtures("form")
def test_what_is_not_finite_stays_in_its_parameter():
    tx = optax_ext.came(0.1)
    params = {"a": jnp.ones((6, 5)), "b": jnp.ones((6, 5))}
    grads = {"a": jnp.full((6, 5), jnp.nan), "b": jnp.ones((6, 5))}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert not np.isfinite(updates["a"]).any()
    assert np.isfinite(updates["b"]).all()


# --- What the compiler makes of it ----------------------------------------------------------------


@pytest.mark.parametrize(
    "tx", [optax_ext.came(1e-3), optax_ext.adafactor(1e-3)], ids=["came", "adafactor"]
)
def test_a_cpu_keeps_no_matrix(tx):
    """Temporaries are blocks, not the squares of eight matrices (1.0 is their size)."""
    params = {f"w{i}": jax.ShapeDtypeStruct((1024, 2048), jnp.float32) for i in range(8)}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = step.lower(params, jax.eval_shape(tx.init, params), params).compile()
    size = sum(p.size * 4 for p in params.values())
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * size


@pytest.mark.parametrize(("devices", "name"), [(1, "_param_step"), (2, "second_moment")])
def test_arrays_of_one_shape_share_a_trace(devices, name):
    """Of the step or, on several devices, of each phase between barriers."""
    tx = optax_ext.came(1e-3)
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        params = {f"w{i}": jnp.ones((256, 256)) for i in range(12)}
        text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
    assert text.count(f"func.func private @{name}(") == 1
    assert text.count(f"call @{name}(") == 12
