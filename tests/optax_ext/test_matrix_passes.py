"""Every form of a pass is the same mathematics; what the programs read is in tests/sharding."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from optax_ext import _matrix_passes

from ..tiers import slow
from . import dims, references, traces

FORMS = {
    "in blocks": ("cpu", lambda shape: next(n for n in (3, 2, 1) if shape[0] % n == 0)),
    "on a GPU": ("cuda", lambda shape: 1),
}


@pytest.fixture(
    scope="class", params=["in blocks", pytest.param("on a GPU", marks=pytest.mark.slow)]
)
def form(request):
    """Arrays of any size take this form. It is chosen while tracing: no trace may outlive it."""
    platform, blocks = FORMS[request.param]
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_matrix_passes, "_MIN_SIZE", 0)
        patch.setattr(_matrix_passes, "_num_blocks", blocks)
        patch.setattr(
            jax.lax,
            "platform_dependent",
            lambda *args, default, **forms: forms.get(platform, default)(*args),
        )
        yield request.param
    jax.clear_caches()


# The shape, and the dims of both means.
SWEEPS = [
    ((12, 5), [(1,), (0,)]),
    ((12, 5), [(0,), (1,)]),
    ((7, 1), [(1,), (0,)]),
    ((6, 4, 5), [(1, 2), (0, 1)]),
    ((6, 4, 5), [(0,), (2,)]),
    ((128, 3), [(1,), (0,)]),  # more rows than a GPU adds up first
    ((2, 32, 48), [(2,), (1,)]),  # tiles of a GPU
    ((2, 33, 50), [(1,), (2,)]),
]


def squares(array, args):
    return (array - args["rows"] * args["cols"]) ** 2 + args["same"] + args["scalar"]


def operands(shape):
    rng = np.random.default_rng(0)
    ndim = len(shape)
    rows = tuple(shape[d] if d == 0 else 1 for d in range(ndim))
    cols = tuple(shape[d] if d == ndim - 1 else 1 for d in range(ndim))
    sizes = {"rows": rows, "cols": cols, "same": shape, "scalar": [1] * ndim}
    return rng.normal(size=shape), {k: rng.normal(size=s) for k, s in sizes.items()}


NAMES = ("columns before rows", "rows around the columns", "batch and stacked", "one column")
NARROW = (
    {"clipping_threshold": None, "debias_instability": True, "mu_dtype": "bfloat16"},
    {"clip": None, "debias": True, "mu_dtype": ml_dtypes.bfloat16},
)


@pytest.mark.usefixtures("x64", "form")
class TestForms:
    """The fixture is of the class: the other tests of this file run without it."""

    def test_a_sweep_is_its_definition(self):
        def sweep(arrays):
            return [
                _matrix_passes.sweep(squares, *array, *over)
                for array, (_, over) in zip(arrays, SWEEPS, strict=True)
            ]

        arrays = [operands(shape) for shape, _ in SWEEPS]
        for means, array, (_, over) in zip(jax.jit(sweep)(arrays), arrays, SWEEPS, strict=True):
            for have, dims_ in zip(means, over, strict=True):
                np.testing.assert_allclose(have, np.mean(squares(*array), axis=dims_), rtol=1e-13)

    def test_squares_of_1e18_fit_into_float32(self):
        square = lambda a, _: jnp.square(a)  # noqa: E731
        sweep = jax.jit(lambda a: _matrix_passes.sweep(square, a, (), (1,), (0,)))
        for have in sweep(jnp.full((16, 600), 1e18, jnp.float32)):
            np.testing.assert_allclose(have, np.full(have.shape, 1e36, np.float32), rtol=1e-5)

    @pytest.mark.parametrize(
        ("make", "reference", "names", "options"),
        [
            (optax_ext.scale_by_came, references.Came, NAMES, ({}, {})),
            (optax_ext.scale_by_came, references.Came, NAMES[2:], NARROW),
            (optax_ext.scale_by_adafactor, references.Adafactor, NAMES[:1], ({}, {})),
        ],
        ids=["came", "came, options", "adafactor"],
    )
    def test_equals_the_reference(self, make, reference, names, options):
        cases = {k: dims.CASES[k] for k in names}
        traces.compare_to_reference(make, reference, cases, 40, *options)


@pytest.mark.parametrize("bits", [None, slow(8)])
def test_an_explicit_mesh_of_one_device_changes_no_value(x64, bits):
    """What ``jax.make_mesh`` makes on a laptop: three dims in blocks, the middle one in shards."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    factoring = optax_ext.Factoring(rows=(0,), cols=(1, 2))
    tx = optax_ext.came(0.1, factoring=optax_ext.by_path({"w": factoring}))
    tx = tx if bits is None else optax_ext.low_precision_state(tx, bits)
    step = jax.jit(traces.step_of(tx))

    def run(place):
        params = place({"w": rows * rng.normal(size=(256, 8, 64))})
        state = tx.init(params)
        for _ in range(2):
            params, state = step(place({"w": rows * rng.normal(size=(256, 8, 64))}), state, params)
        return params, state

    rows, found = 10.0 ** (np.arange(256) % 5)[:, None, None], []
    for spec in (None, P(), P(None, "data")):
        sharding = spec if spec is None else NamedSharding(mesh, spec)
        rng = np.random.default_rng(0)
        with contextlib.nullcontext() if spec is None else jax.set_mesh(mesh):
            found.append(run(lambda tree, sharding=sharding: jax.device_put(tree, sharding)))
    for have in found[1:]:
        chex.assert_trees_all_close(have, found[0], rtol=1e-12)


# --- Which form ---------------------------------------------------------------------------------


def test_a_cpu_keeps_no_matrix():
    """Temporaries are blocks, not the squares of eight matrices (1.0 is their size)."""
    tx = optax_ext.came(1e-3)
    params = {f"w{i}": jax.ShapeDtypeStruct((1024, 2048), jnp.float32) for i in range(8)}
    step = traces.step_of(tx)
    # Results take the memory of donated arguments in their order.
    in_order = jax.jit(lambda p, state, grads: step(grads, state, p), donate_argnums=(0, 1))
    compiled = in_order.lower(params, jax.eval_shape(tx.init, params), params).compile()
    size = sum(p.size * 4 for p in params.values())
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * size


@pytest.mark.parametrize(("devices", "name"), [(1, "_param_step"), (2, "second_moment")])
def test_arrays_of_one_shape_share_a_trace(devices, name):
    """Of the step or, on several devices, of each phase between barriers."""
    tx = optax_ext.came(1e-3)
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        params = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(12)}
        state = jax.eval_shape(tx.init, params)
        text = jax.jit(tx.update).lower(params, state, params).as_text()
    assert text.count(f"func.func private @{name}(") == 1
    assert text.count(f"call @{name}(") == 12
