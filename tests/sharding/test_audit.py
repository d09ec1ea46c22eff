"""What the auditor reads equals what can be counted by hand, on programs of each platform."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding.plan._costs import costs
from sharding.plan._devices import KINDS
from sharding.plan._hlo import Program
from sharding.plan._liveness import at_peak
from sharding.plan._phases import phase_of, shortened

MIB = 2**20
PROGRAMS = pathlib.Path(__file__).parent / "programs"


def compiled(fn, *shapes, donate=(), dtype=jnp.float32):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(fn, donate_argnums=donate).lower(*args).compile()


def counted(program):
    """All floating-point operations, those of matrix products, and bytes."""
    found, endless = costs(Program(program if isinstance(program, str) else program.as_text()))
    assert not endless
    return tuple(
        sum(getattr(c, name) for c in found) for name in ("flops", "matmul_flops", "nbytes")
    )


# --- Operations and bytes, of programs compiled here ----------------------------------------------


@pytest.mark.parametrize(
    ("fn", "shapes", "flops"),
    [
        (jnp.matmul, [(32, 64), (64, 128)], 2 * 32 * 64 * 128),
        (jnp.matmul, [(5, 32, 64), (5, 64, 16)], 2 * 5 * 32 * 64 * 16),
        (lambda a, b: jnp.einsum("abc,dcb->ad", a, b), [(8, 3, 4), (6, 4, 3)], 2 * 8 * 6 * 12),
    ],
)
def test_matrix_products(fn, shapes, flops):
    assert counted(compiled(fn, *shapes))[1] == flops


@pytest.mark.parametrize(
    ("padding", "stride", "holes", "dilation", "pairs"),
    [
        (0, 1, 1, 1, 6 * 3),  # 8 places, 3 taps
        (1, 1, 1, 1, 8 * 3 - 2),  # two taps lie outside
        (0, 2, 1, 1, 3 * 3),
        (0, 1, 1, 2, 4 * 3),
        (0, 1, 2, 1, 7 * 2 + 6),  # every other place is a hole
    ],
)
def test_convolutions_without_what_is_padding(padding, stride, holes, dilation, pairs):
    def fn(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (stride,),
            [(padding, padding)],
            lhs_dilation=(holes,),
            rhs_dilation=(dilation,),
            dimension_numbers=("NHC", "HIO", "NHC"),
        )

    assert counted(compiled(fn, (2, 8, 5), (3, 5, 7)))[1] == 2 * pairs * 2 * 5 * 7


def test_arithmetic_is_one_for_each_element():
    program = compiled(lambda x, y: jnp.sum(jnp.exp(x) * y), (100, 7), (100, 7))
    assert counted(program)[0] == pytest.approx(3 * 700, rel=0.01)  # sums are made in stages


def test_elementwise_bytes_are_what_goes_in_and_out():
    n = 4096
    assert counted(compiled(lambda x, y: x * y + 1, (n,), (n,)))[2] == 3 * 4 * n


def test_loops_count_as_often_as_they_run():
    def fn(x, w):
        x, _ = lax.scan(lambda x, w: (x @ w, None), x, w)
        return x

    _, products, nbytes = counted(compiled(fn, (32, 64), (10, 64, 64)))
    assert products == 10 * 2 * 32 * 64 * 64
    # Each step cuts one layer's weights out of all, multiplies, and copies the result; before the
    # first, x is copied.
    weights, x = 4 * 64 * 64, 4 * 32 * 64
    assert nbytes == pytest.approx(10 * (3 * weights + 4 * x) + 2 * x, rel=1e-3)


def test_nested_loops():
    def fn(x, w):
        return lax.fori_loop(0, 3, lambda _, x: lax.fori_loop(0, 5, lambda _, x: x @ w, x), x)

    assert counted(compiled(fn, (8, 8), (8, 8)))[1] == 3 * 5 * 2 * 8**3


def test_of_branches_the_dearest():
    def fn(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

    assert counted(compiled(fn, (8, 8), (8, 8)))[1] == 2 * 2 * 8**3


def test_a_loop_without_an_end_counts_once():
    def fn(x, w):
        return lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x @ w, x)

    program = compiled(fn, (8, 8), (8, 8))
    found, endless = costs(Program(program.as_text()))
    assert sum(c.matmul_flops for c in found) == 2 * 8**3
    assert len(endless) == 1
    assert any("counted once" in text for text in shd.audit(program).warnings)


def test_a_slice_that_is_changed_in_place_costs_the_slice():
    def fn(x, y):
        return lax.dynamic_update_slice(x, y, (3, 0))

    program = compiled(fn, (1000, 64), (2, 64), donate=0)
    assert counted(program)[2] <= 4 * 4 * 2 * 64


def test_as_many_as_xla_counts_where_it_counts_loops_and_slices_alike():
    """A step without loops, beside XLA's own analysis, which CPUs have."""

    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

    def step(w, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

    program = (
        jax.jit(step)
        .lower([jnp.ones((64, 256)), jnp.ones((256, 64))], jnp.ones((32, 64)))
        .compile()
    )
    flops, _, nbytes = counted(program)
    theirs = program.cost_analysis()
    assert flops == pytest.approx(theirs["flops"], rel=0.02)
    assert nbytes == pytest.approx(theirs["bytes accessed"], rel=0.1)


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_schedule_gives_the_compilers_temporaries(checkpoint):
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w.T), None

    def loss(w, x):
        x, _ = lax.scan(jax.checkpoint(layer) if checkpoint else layer, x, w)
        return jnp.mean(x**2)

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    program = compiled(step, (8, 128, 128), (512, 128), donate=0)
    found = at_peak(Program(program.as_text()))
    assert sum(b.nbytes for b in found) == pytest.approx(
        program.memory_analysis().temp_size_in_bytes, rel=0.1
    )


def test_arguments_by_name_and_new_results():
    def step(params, opt_state, batch):
        return jax.tree.map(lambda p, m: p + m, params, opt_state), batch.sum()

    tree = {"w": jnp.ones((64, 64))}
    lowered = jax.jit(step, donate_argnums=0).lower(tree, tree, jnp.ones((128,)))
    found = shd.audit(lowered.compile())
    assert found.arguments == {
        "master weights": 0,
        "optimizer state": 4 * 64 * 64,
        "parameters": 4 * 64 * 64,
        "batch and others": 4 * 128,
    }
    assert found.results <= 64  # the sum; the rest takes over the parameters' memory


def test_a_state_of_zero_is_told_apart():
    """A pair, and master weights in it."""
    import optax

    import optax_ext

    tx = optax_ext.master_weights(optax.adam(1e-3))
    zero = shd.Zero(jax.make_mesh((8,), ("data",), (AxisType.Auto,)), stage=2, min_shard_size=0)

    def make_state():
        params = {"w": jnp.ones((256, 64), jnp.bfloat16)}
        return params, tx.init(params)

    step = zero.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx=tx)
    state = zero.abstract_state(make_state, tx=tx)
    batch = jax.ShapeDtypeStruct((16, 256), jnp.bfloat16)
    found = shd.audit(step.lower(state, batch).compile())
    size = 256 * 64
    assert found.arguments["parameters"] == 2 * size
    assert found.arguments["master weights"] == 4 * size / 8
    assert found.arguments["optimizer state"] == pytest.approx(8 * size / 8, abs=16)
    phases = {each.phase: each.axes for each in found.traffic if each.wire_bytes > 1e3}
    assert phases == {"gradient exchange": ("data",), "gather": ("data",)}


# --- Programs of other machines, counted by hand --------------------------------------------------

LAYERS, WIDTH, ROWS = 3, 512, 256  # as in programs/record.py
RECORDED = {
    "cpu_8": ((8,), ("data",)),
    "h200x8": ((8,), ("data",)),
    "v5e_4x4": ((4, 4), ("x", "y")),
    "v5e_4x4_2": ((2, 4, 4), ("slice", "x", "y")),
}


def recorded(name):
    mesh = AbstractMesh(*RECORDED[name])
    device = None if name == "cpu_8" else name.split("x8")[0].split("_")[0]
    return shd.audit((PROGRAMS / f"{name}.txt").read_text(), mesh=mesh, device=device)


@pytest.mark.parametrize("name", RECORDED)
def test_operations(name):
    """Each layer once forward, again for the backward pass, and twice in it."""
    assert recorded(name).matmul_flops == 4 * LAYERS * 2 * ROWS * WIDTH**2


@pytest.mark.parametrize("name", RECORDED)
def test_arguments(name):
    n = 8 if "x8" in name or "cpu" in name else 16
    found = recorded(name).arguments
    assert found["parameters"] == 4 * LAYERS * WIDTH**2 / n
    assert found["batch and others"] == 4 * ROWS * WIDTH


@pytest.mark.parametrize("name", RECORDED)
def test_collectives(name):
    """Weights are gathered twice and their gradients scattered once, on each axis in turn.

    TPU compilers round what they multiply to bfloat16, and do it before they gather.
    """
    size = LAYERS * WIDTH**2
    shape, names = RECORDED[name]
    inner = dict(zip(names[-2:], shape[-2:], strict=True)) if len(names) > 1 else {"data": 8}
    width = 2 if "v5e" in name else 4
    expected, left = {}, 1.0
    for axis, n in reversed(inner.items()):
        expected["all-gather", (axis,)] = (2 * LAYERS, 2 * size * width * left * (n - 1) / n)
        expected["reduce-scatter", (axis,)] = (LAYERS, size * 4 * left * (n - 1) / n)
        left /= n
    if "slice" in names:
        expected["all-reduce", ()] = (1, 2 * size * 4 / 16 / 2)
    found = {
        (each.op, each.axes): (each.count, each.wire_bytes)
        for each in recorded(name).traffic
        if each.wire_bytes > 1000  # the loss
    }
    assert found.keys() == expected.keys()
    for key, (count, wire) in expected.items():
        assert found[key][1] == pytest.approx(wire, abs=1000), key
        assert found[key][0] in (count, count + 1)  # the loss is all-reduced, too


def test_phases_of_recorded_programs():
    for name in ("cpu_8", "h200x8", "v5e_4x4"):
        found = {each.op: each.phase for each in recorded(name).traffic if each.wire_bytes > 100}
        assert found == {"all-gather": "gather", "reduce-scatter": "gradient exchange"}


def test_a_tpus_fast_memory_is_no_main_memory():
    """Small enough for it, the whole program moves little more than its arguments."""
    found = recorded("v5e_4x4")
    arguments = sum(found.arguments.values())
    assert sum(found.nbytes.values()) < 3 * arguments
    assert sum(recorded("cpu_8").nbytes.values()) > 20 * arguments


def test_bounds_on_the_time():
    found, kind = recorded("v5e_4x4_2"), KINDS["v5e"]
    slow = sum(each.wire_bytes for each in found.traffic if each.across_slices)
    assert found.seconds == pytest.approx(
        {
            "compute": sum(found.flops.values()) / kind.flops,
            "memory": sum(found.nbytes.values()) / kind.bandwidth,
            "wire": (found.wire_bytes - slow) / kind.link,
            "network between slices": slow / kind.network,
        }
    )
    assert slow > 0
    assert recorded("cpu_8").seconds == {}


# --- Warnings -------------------------------------------------------------------------------------


def on_mesh(fn, *, shape=(256, 512)):
    """A program of 8 devices, each with an array of this shape."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return compiled(mapped, (8 * shape[0], shape[1]))


def test_an_all_reduce_that_is_cut_afterwards():
    def all_reduced(x):
        me = lax.axis_index("data")
        return lax.dynamic_slice_in_dim(lax.psum(x, "data"), me * 32, 32)

    def scattered(x):
        return lax.psum_scatter(x, "data", tiled=True)

    (text,) = shd.audit(on_mesh(all_reduced)).warnings
    assert "sums of 512 KiB are all-reduced and then cut" in text
    assert not shd.audit(on_mesh(scattered)).warnings
    assert not shd.audit(on_mesh(lambda x: lax.psum(x, "data"))).warnings


def test_a_reduce_scatter_that_became_an_all_reduce():
    def fn(x):
        me = lax.axis_index("data")
        with jax.named_scope("reduce_scatter"):
            return lax.dynamic_slice_in_dim(lax.psum(x, "data"), me * 32, 32)

    text = on_mesh(fn).as_text().replace("reduce_scatter/psum", "reduce_scatter")
    (note,) = shd.audit(text).warnings
    assert "all-reduces where the program asks for reduce-scatters" in note


def test_a_gather_in_the_update():
    def fn(x):
        with jax.named_scope("update"):
            return jnp.sum(lax.all_gather(x, "data"), 0)

    (text,) = shd.audit(on_mesh(fn)).warnings
    assert "the optimizer gathers 3.50 MiB a step" in text


def train(layer, rows=512):
    def loss(w, x):
        x, _ = lax.scan(layer, x, w)
        return jnp.mean(x**2)

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    return compiled(step, (8, 128, 128), (rows, 128), donate=0)


def layer(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w.T), None


def test_activations_that_grow_with_depth():
    (text,) = shd.audit(train(layer)).warnings
    assert "temporaries grow with depth" in text
    assert "of activations a layer" in text
    assert not shd.audit(train(jax.checkpoint(layer))).warnings


def test_gathered_parameters_that_grow_with_depth():
    def gathering(x, w):
        with jax.named_scope("gather"):
            w = w * 2  # stands for a gather: a new array that the backward pass reads
        return jnp.tanh(x @ w), None

    notes = shd.audit(train(gathering, rows=32)).warnings
    assert any("64.0 KiB of gathered parameters a layer" in text for text in notes)


def test_a_donated_argument_that_is_copied():
    def fn(x, y):
        return y, x  # each takes over the other's memory

    args = (jnp.ones((256, 256)), jnp.ones((256, 256)))
    program = jax.jit(fn, donate_argnums=(0, 1)).lower(*args).compile()
    (text,) = shd.audit(program).warnings
    assert "of donated arguments are copied" in text
    assert not shd.audit(jax.jit(fn).lower(*args).compile()).warnings


def test_what_does_not_fit():
    program = compiled(lambda x: x * 2, (1024, 1024))
    small = shd.DeviceKind("tiny", 5 * MIB, 1e9, 1e9, 1e9, None, "made up")
    found = shd.audit(program, device=small)
    assert found.fits is False
    assert found.memory == 8 * MIB
    assert "3.00 MiB more than a tiny has" in found.warnings[0]
    assert "DOES NOT FIT" in str(found)


# --- Shown ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_tables_fit_80_columns(name):
    shown = str(recorded(name))
    assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith("warning"))


def test_text_and_json():
    found = recorded("v5e_4x4")
    shown = str(found)
    for word in ("parameters", "reduce-scatter", "gradient exchange", "not faster than, by wire"):
        assert word in shown
    again = json.loads(json.dumps(found.to_dict()))
    assert again["wire_bytes"] == found.wire_bytes
    assert again["seconds"] == found.seconds


def test_theory_beside_it():
    text = (PROGRAMS / "cpu_8.txt").read_text()
    theory = 3 * 4 * LAYERS * WIDTH**2 * 7 / 8
    assert "1.000 of theory" in str(shd.audit(text, expected_wire=theory))


def test_an_unknown_device():
    with pytest.raises(ValueError, match=r"device 'abacus' asked for, whose figures are not known"):
        shd.audit(compiled(lambda x: x, (2,)), device="abacus")


@pytest.mark.parametrize(
    ("scope", "shown"),
    [
        ("jit(step)/shard_map/jvp()/while/body/closed_call/gather/all_gather", "gather/all_gather"),
        ("jit(step)/transpose(jvp(gather))/reduce_scatter", "reduce_scatter"),  # both are too long
        ("jit(step)/update/reduce_sum", "update/reduce_sum"),
        ("", ""),
    ],
)
def test_scopes_are_shown_by_their_ends(scope, shown):
    assert shortened(scope) == shown


@pytest.mark.parametrize(
    ("scope", "phase"),
    [
        ("jit(step)/shard_map/loss_and_grad/jvp(gather)/all_gather", "gather"),
        ("jit(f)/jvp(jit(take_along_axis))/gather", "forward"),  # a lookup
        ("jit(f)/transpose(jvp())/dot_general", "backward"),
        ("jit(f)/checkpoint/rematted_computation/dot_general", "backward"),
        ("jit(f)/transpose(jvp(gather))/reduce_scatter", "gradient exchange"),
        ("jit(step)/shard_map/reduce_gradients/psum", "gradient exchange"),
        ("jit(step)/update/mul", "update"),
        ("jit(step)/gather_params/copy", "gather"),
        ("jit(f)/add", "other"),
        ("", "other"),
    ],
)
def test_phases(scope, phase):
    assert phase_of(scope) == phase


def test_the_audit_runs_nothing():
    """A program may be read whose arrays no machine here could hold."""
    program = compiled(lambda x: x[:1].sum(), (2**22, 2**14))
    assert shd.audit(program).arguments["batch and others"] == 4 * 2**36
    assert np.isfinite(shd.audit(program).memory)
