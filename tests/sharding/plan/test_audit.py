"""What the auditor reads equals what can be counted by hand, on programs of each platform."""

import dataclasses
import functools
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

import optax_ext
import sharding as shd
from sharding.plan import estimate, find_batch
from sharding.plan.audit._hlo import Program, phase_of, shortened
from sharding.plan.audit._program_costs import costs
from sharding.plan.audit._program_memory import PARTS, arguments_of, at_peak, temporary_bytes
from sharding.plan.machine._devices import KINDS

from ...compilers import need
from ...flax_nnx import needs_nnx, nnx
from ..model import make_of, zero_on
from .programs.record import LAYERS, MESHES, ROWS, WIDTH, path_of

pytestmark = pytest.mark.usefixtures("scopes_in_cache_key")

MIB = 2**20


def compiled(fn, *shapes, donate=()):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(fn, donate_argnums=donate).lower(*args).compile()


def counted(program):
    """All floating-point operations, those of matrix products, and bytes."""
    found, endless = costs(Program(program if isinstance(program, str) else program.as_text()))
    assert not endless
    return tuple(sum(getattr(c, x) for c in found) for x in ("flops", "matmul_flops", "nbytes"))


def loop(x, w):
    return lax.fori_loop(0, 3, lambda _, x: lax.fori_loop(0, 5, lambda _, x: x @ w, x), x)


def branches(x, w):
    return lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)


@pytest.mark.parametrize(
    ("fn", "shapes", "products"),
    [
        (jnp.matmul, [(5, 32, 64), (5, 64, 16)], 5 * 32 * 64 * 16),
        (lambda a, b: jnp.einsum("abc,dcb->ad", a, b), [(8, 3, 4), (6, 4, 3)], 8 * 6 * 12),
        (loop, [(8, 8), (8, 8)], 3 * 5 * 8**3),
        (branches, [(8, 8), (8, 8)], 2 * 8**3),  # of the dearest one
    ],
    ids=["matmul", "einsum", "nested loops", "branches"],
)
def test_matrix_products(fn, shapes, products):
    assert counted(compiled(fn, *shapes))[1] == 2 * products


@pytest.mark.parametrize(
    ("padding", "stride", "holes", "dilation", "pairs"),
    [
        (1, 1, 1, 1, 8 * 3 - 2),  # two taps lie outside
        (0, 2, 1, 2, 2 * 3),
        (0, 1, 2, 1, 7 * 2 + 6),  # every other place is a hole
    ],
)
def test_convolutions_without_what_is_padding(padding, stride, holes, dilation, pairs):
    def fn(x, w):
        options = {"lhs_dilation": (holes,), "rhs_dilation": (dilation,)}
        numbers = ("NHC", "HIO", "NHC")
        return lax.conv_general_dilated(
            *(x, w, (stride,), [(padding, padding)]), dimension_numbers=numbers, **options
        )

    assert counted(compiled(fn, (2, 8, 5), (3, 5, 7)))[1] == 2 * pairs * 2 * 5 * 7


def test_loops_count_as_often_as_they_run():
    """And those without an end once, with a warning."""

    def fn(x, w):
        return lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    def endless(x, w):
        return lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x @ w, x)

    found = shd.audit(compiled(endless, (8, 8), (8, 8)))
    assert found.matmul_flops == 2 * 8**3
    assert any("counted once" in text for text in found.warnings)
    _, products, nbytes = counted(compiled(fn, (32, 64), (10, 64, 64)))
    assert products == 10 * 2 * 32 * 64 * 64
    # Each step slices one layer's weights out of all, multiplies, and copies the result; before the
    # first, x is copied.
    weights, x = 4 * 64 * 64, 4 * 32 * 64
    assert nbytes == pytest.approx(10 * (3 * weights + 4 * x) + 2 * x, rel=1e-3)


# Programs for TPUs update codes in place after a copy whose result aliases its operand.
RELABELED = """HloModule m

%relabel (x: u8[1024,128]) -> u8[1024,128] {
  %x = u8[1024,128]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %c = u8[1024,128]{1,0:T(8,128)(4,1)} copy(%x)
}

%in_place (a: u8[1024,128], u: u8[32,128], i: s32[]) -> u8[1024,128] {
  %a = u8[1024,128]{1,0:T(32,128)(4,1)} parameter(0)
  %u = u8[32,128]{1,0:T(32,128)(4,1)} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %f = u8[1024,128]{1,0} fusion(%a), calls=%relabel, output_to_operand_aliasing={{}: (0, {})}
  ROOT %d = u8[1024,128]{1,0:T(32,128)(4,1)} dynamic-update-slice(%f, %u, %i, %zero)
}

ENTRY %main (a: u8[1024,128], u: u8[32,128], i: s32[]) -> u8[1024,128] {
  %a = u8[1024,128]{1,0:T(32,128)(4,1)} parameter(0)
  %u = u8[32,128]{1,0:T(32,128)(4,1)} parameter(1)
  %i = s32[] parameter(2)
  ROOT %r = u8[1024,128]{1,0:T(32,128)(4,1)} fusion(%a, %u, %i), kind=kLoop, calls=%in_place
}
"""
# A slice in the fast memory of the chip.
MOVED = """HloModule m

ENTRY %main (a: f32[1024,128], i: s32[]) -> f32[1024,128] {
  %a = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %s = f32[32,128]{1,0:T(8,128)S(1)} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={32,128}
  ROOT %d = f32[1024,128]{1,0:T(8,128)} dynamic-update-slice(%a, %s, %i, %zero)
}
"""


@pytest.mark.parametrize(
    ("program", "nbytes"), [(RELABELED, 2 * 32 * 128 + 4), (MOVED, 2 * 4 * 32 * 128)]
)
def test_what_moves_no_bytes_of_main_memory(program, nbytes):
    assert counted(program)[2] == nbytes


def test_as_many_as_xla_counts_where_it_counts_loops_and_slices_alike():
    """A step without loops, beside XLA's own analysis, which CPUs have."""

    def step(v, w, x):
        def loss(w):
            return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, (v, w), jax.grad(loss)((v, w)))

    program = compiled(step, (64, 256), (256, 64), (32, 64))
    flops, _, nbytes = counted(program)
    theirs = program.cost_analysis()
    assert flops == pytest.approx(theirs["flops"], rel=0.02)
    assert nbytes == pytest.approx(theirs["bytes accessed"], rel=0.1)


def train(layer):
    def loss(w, x):
        x, _ = lax.scan(layer, x, w)
        return jnp.mean(x**2)

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    return compiled(step, (8, 128, 128), (512, 128), donate=0)


def layer(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w.T), None


@pytest.mark.parametrize("layer", [layer, jax.checkpoint(layer)], ids=["stored", "checkpoint"])
def test_the_schedule_gives_the_compilers_temporaries(layer):
    program = train(layer)
    found = at_peak(Program(program.as_text()))
    held = program.memory_analysis().temp_size_in_bytes
    assert sum(b.nbytes for b in found) == pytest.approx(held, rel=0.1)


def test_a_start_allocates_its_results():
    """Its type lists the operands, too."""
    program = """HloModule m, is_scheduled=true

ENTRY %main (p: f32[64,8]) -> f32[128,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %a = f32[64,8]{1,0} add(%p, %p)
  %s = (f32[64,8]{1,0}, f32[128,8]{1,0}) all-gather-start(%a), replica_groups={{0,1}}
  %d = f32[128,8]{1,0} all-gather-done(%s)
  ROOT %r = f32[128,8]{1,0} negate(%d)
}
"""
    found = {each.name: each.nbytes for each in at_peak(Program(program))}
    assert found == {"a": 4 * 64 * 8, "s": 4 * 128 * 8}


def test_a_tuple_in_the_results_of_a_fusion():
    """One reduction of two operands, beside an array that is read last."""
    program = """HloModule m, is_scheduled=true

%fused (x: f32[64,8]) -> ((f32[8], f32[8]), f32[64,8]) {
  %x = f32[64,8]{1,0} parameter(0)
  %z = f32[] constant(0)
  %n = f32[64,8]{1,0} negate(%x)
  %s = (f32[8]{0}, f32[8]{0}) reduce(%x, %n, %z, %z), dimensions={0}, to_apply=%add
  ROOT %t = ((f32[8]{0}, f32[8]{0}), f32[64,8]{1,0}) tuple(%s, %n)
}

ENTRY %main (p: f32[64,8]) -> f32[64,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %f = ((f32[8]{0}, f32[8]{0}), f32[64,8]{1,0}) fusion(%p), kind=kInput, calls=%fused
  %g = f32[64,8]{1,0} get-tuple-element(%f), index=1
  %b = f32[64,8]{1,0} negate(%g)
  ROOT %r = f32[64,8]{1,0} add(%b, %g)
}
"""
    found = {each.name: each.nbytes for each in at_peak(Program(program))}
    assert found == {"f/2": 4 * 64 * 8, "b": 4 * 64 * 8}


# Layers, sequences of a micro-batch, micro-batches and recomputation; argument_size, temp_size and
# peak_memory, and where the addresses of temporaries end in the compiler's dump of the program, in
# GiB: 7B on v5e:2x4 at stage 3, 2,048 tokens, libtpu 0.0.42.1.
ON_TPUS = [
    (4, 1, 2, "full", 0.749, 3.302, 3.022, 2.405),
    (24, 1, 2, "full", 3.576, 8.891, 9.223, 5.778),
    (24, 4, 2, "full", 3.576, 14.918, 13.438, 9.867),
    (24, 1, 1, "minimal_with_context", 3.576, 9.386, 10.367, 6.946),
]


def memory(argument=0, temp=0, peak=0, **others):
    """As ``memory_analysis`` gives it; all results take over the memory of arguments."""
    names = ("host_argument", "host_temp", "argument", "temp", "output", "alias")
    sizes = {f"{name}_size_in_bytes": 0 for name in names}
    sizes |= {"argument_size_in_bytes": argument, "output_size_in_bytes": argument}
    sizes |= {"alias_size_in_bytes": argument, "temp_size_in_bytes": temp}
    return types.SimpleNamespace(**sizes | others, peak_memory_in_bytes=peak)


@pytest.mark.parametrize("program", ON_TPUS)
def test_temporaries_of_a_tpu_are_those_of_its_addresses(program):
    """What is live, not what is said to be allocated."""
    argument, temp, peak, end = program[4:]
    found = temporary_bytes(memory(argument, temp, peak), tiled=True)
    assert 0.94 * end < found <= end
    assert temp > 1.3 * end


@pytest.mark.parametrize(
    ("found", "nbytes"),
    [
        (memory(100, 20, 130), 20),  # 10 bytes are in the memory of the chip
        (memory(100, 50, 0), 50),  # a compiler that does not tell
        (memory(100, 50, 142, host_argument_size_in_bytes=8, host_temp_size_in_bytes=4), 30),
        (memory(100, 50, 140, output_size_in_bytes=110), 30),  # ten bytes of new results
    ],
)
def test_what_is_live(found, nbytes):
    assert temporary_bytes(found, tiled=True) == nbytes
    assert temporary_bytes(memory(4, 9, 7), tiled=False) == 9  # what is allocated


def test_the_parts_of_a_state_of_zero():
    tx = optax_ext.master_weights(optax.adam(1e-3))
    zero = zero_on(8, stage=2)
    make_state = make_of(lambda: {"w": jnp.ones((256, 64), jnp.bfloat16)}, tx)
    step = zero.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx=tx)
    state = zero.abstract_state(make_state, tx=tx)
    batch = jax.ShapeDtypeStruct((16, 256), jnp.bfloat16)
    found = shd.audit(step.lower(state, batch).compile())
    size = 256 * 64
    assert found.arguments["parameters"] == 2 * size
    assert found.arguments["master weights"] == 4 * size / 8
    assert found.arguments["optimizer state"] == pytest.approx(8 * size / 8, abs=16)
    phases = {each.phase: each.axes for each in found.traffic if each.wire_bytes > 1e3}
    assert phases == {"gradient sync": ("data",), "gather": ("data",)}


def test_a_program_is_compared_with_its_plan_row_by_row():
    """Sent bytes by operation and axes, operations, parts of the memory; of another plan they are
    named, each with both figures."""
    tx, params = optax.adam(1e-3), {"w": jnp.ones((256, 64))}
    zero = zero_on(8, stage=2)
    step = zero.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx=tx)
    state = zero.abstract_state(make_of(lambda: params, tx), tx=tx)
    program = step.lower(state, jax.ShapeDtypeStruct((16, 256), jnp.float32)).compile()
    plan = estimate(params, tx, zero)
    found = shd.audit(program, expected=plan.stage("stage 2"))
    assert not found.differences
    assert found.wire_bytes == pytest.approx(found.expected_wire, rel=0.01)
    assert found.expected_memory is None  # without activations

    size = 4.0 * 256 * 64
    other = shd.audit(program, expected=plan.stage("stage 0"))
    rows = {row.name: row[1:] for row in other.differences}
    assert rows["all-reduce over data"] == (2 * size * 7 / 8, pytest.approx(4, abs=8))
    assert rows["all-gather over data"] == rows["reduce-scatter over data"] == (0, size * 7 / 8)
    assert "all-gather over data" in str(other)
    assert other.to_dict()["differences"] == [row._asdict() for row in other.differences]

    # The ledger of a program has all its figures.
    rows = found.ledger()
    assert (rows.wire, rows.products, rows.peak) == (
        *(found.wire_bytes, found.matmul_flops),
        pytest.approx(found.memory),
    )
    more = dataclasses.replace(rows, work=(*rows.work, *rows.work))
    names = {row.name for row in shd.audit(program, expected=more).differences}
    assert names == {"products", "all-gather over data", "reduce-scatter over data"}
    wide = tuple(row._replace(nbytes=2 * row.nbytes) for row in rows.held)
    held = dataclasses.replace(rows, buffers=wide)
    names = {row.name for row in shd.audit(program, expected=held).differences}
    assert names == {"params", "state", "grads"}  # the batch is below 1 % of all


@functools.cache
def recorded(target):
    mesh, device = AbstractMesh(*MESHES[target][::-1]), None if target == "cpu:8" else target
    return shd.audit(path_of(target).read_text(), mesh=mesh, device=device)


@pytest.mark.parametrize("target", MESHES)
def test_recorded_programs(target):
    """Each layer once forward, again for the backward pass, and twice in it.

    Weights are gathered twice and their gradients scattered once, on one axis after the other. TPU
    compilers round what they multiply to bfloat16, and do it before they gather.
    """
    found, size = recorded(target), LAYERS * WIDTH**2
    assert found.matmul_flops == 4 * 2 * ROWS * size
    n = 16 if "v5e" in target else 8
    assert found.arguments["parameters"] == 4 * size / n
    assert found.arguments["batch and others"] == 4 * ROWS * WIDTH

    names, shape = MESHES[target]
    inner = dict(zip(names[-2:], shape[-2:], strict=True)) if len(names) > 1 else {"data": 8}
    width = 2 if "v5e" in target else 4
    expected, left = {}, 1.0
    for axis, n in reversed(inner.items()):
        expected["all-gather", (axis,)] = (2 * LAYERS, 2 * size * width * left * (n - 1) / n)
        expected["reduce-scatter", (axis,)] = (LAYERS, size * 4 * left * (n - 1) / n)
        left /= n
    if "slice" in names:
        expected["all-reduce", ()] = (1, 2 * size * 4 / 16 / 2)
    traffic = {(x.op, x.axes): x for x in found.traffic if x.wire_bytes > 1000}  # not the loss
    assert traffic.keys() == expected.keys()
    for key, (count, wire) in expected.items():
        assert traffic[key].wire_bytes == pytest.approx(wire, abs=1000), key
        assert traffic[key].count in (count, count + 1)  # the loss is all-reduced, too
    if "slice" not in names:
        phases = {each.op: each.phase for each in traffic.values()}
        assert phases == {"all-gather": "gather", "reduce-scatter": "gradient sync"}

    shown = str(found)
    assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith("warning"))
    assert ("not faster than, by wire" in shown) == (target != "cpu:8")
    again = json.loads(json.dumps(found.to_dict()))
    assert (again["wire_bytes"], again["seconds"]) == (found.wire_bytes, found.seconds)


def test_what_the_compiler_computes_again():
    """The clones of XLA's rematerialization, in loops by their trips, are said with their share."""
    text = path_of("v5e:4x4").read_text()
    name = re.search(r"%(\S*fusion\S*) = .*jvp.*dot_general", text)[1]
    clone = text.replace(f"%{name} ", f"%{name}.remat2 ").replace(f"%{name})", f"%{name}.remat2)")
    clone = clone.replace(f"%{name},", f"%{name}.remat2,")
    (said,) = shd.audit(clone).of_compiler
    assert said.startswith("XLA computes 1 operation again by itself, 0.4 GFLOP (25.0% of")
    assert said in str(shd.audit(clone))
    assert recorded("v5e:4x4").of_compiler == ()


def test_a_compiler_that_computes_again():
    """Above the memory of a GPU, XLA does; with fewer rows, whose peak is below it, it does not."""
    need("h100x1")
    mesh = shd.targets.mesh("h100x1", (1,), ("data",))

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def said(rows):
        on_gpu = NamedSharding(mesh, P())
        shapes = [*[(4096, 4096)] * 32, (rows, 4096)]
        *weights, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=on_gpu) for s in shapes)
        return shd.audit(jax.jit(jax.grad(loss)).lower(weights, x), device="h100x1").of_compiler

    (above,), below = said(350_000), said(50_000)
    assert re.search("operations again by itself, .*, in .* GiB of 79.1 GiB of an h100", above)
    assert below == ()


def test_bounds_on_the_time():
    found, kind = recorded("v5e:4x4*2"), KINDS["v5e"]
    slow = sum(each.wire_bytes for each in found.traffic if each.across_slices)
    assert found.seconds == pytest.approx(
        {
            "compute": sum(found.flops.values()) / kind.flops,
            "memory": sum(found.nbytes.values()) / kind.bandwidth,
            "wire": (found.wire_bytes - slow) / kind.link,
            "network": slow / kind.network,
        }
    )
    assert slow > 0
    assert recorded("cpu:8").seconds == {}


def on_mesh(fn):
    """A program of 8 devices, each with an array of this shape."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return compiled(mapped, (8 * 256, 512))


def test_an_all_reduce_that_is_sliced_afterwards():
    def all_reduced(x):
        me = lax.axis_index("data")
        with jax.named_scope("reduce_scatter"):
            return lax.dynamic_slice_in_dim(lax.psum(x, "data"), me * 32, 32)

    def scattered(x):
        return lax.psum_scatter(x, "data", tiled=True)

    (text,) = shd.audit(on_mesh(all_reduced)).warnings
    assert "sums of 512 KiB are all-reduced and then sliced" in text
    assert not shd.audit(on_mesh(scattered)).warnings
    assert not shd.audit(on_mesh(lambda x: lax.psum(x, "data"))).warnings


def test_what_grows_with_depth():
    (text,) = shd.audit(train(layer)).warnings
    assert "temporaries grow with depth" in text
    assert "of activations a layer" in text
    assert not shd.audit(train(jax.checkpoint(layer))).warnings


def test_a_donated_argument_that_is_copied():
    def fn(x, y):
        return y, x  # each takes over the other's memory

    args = (jnp.ones((256, 256)), jnp.ones((256, 256)))
    program = jax.jit(fn, donate_argnums=(0, 1)).lower(*args).compile()
    (text,) = shd.audit(program).warnings
    assert "of donated arguments are copied" in text
    assert not shd.audit(jax.jit(fn).lower(*args).compile()).warnings


def test_what_does_not_fit_and_how_fast_it_is():
    program = compiled(lambda x: x * 2, (1024, 1024))  # 8 MiB

    def audited(mib, tokens=None, bandwidth=1e9):
        kind = shd.DeviceKind("small", mib * MIB, bandwidth, 1e9, 1e9, None, "made up")
        return shd.audit(program, device=kind, tokens=tokens)

    found = audited(5)
    assert (found.fits, found.memory) == (False, 8 * MIB)
    assert "3.00 MiB more than a small has" in found.warnings[0]
    for mib, verdict, warned in ((8.5, "fits, barely", 1), (9, "a small has: fits", 0)):
        found = audited(mib)
        assert found.headroom == pytest.approx(1 - 8 / mib)
        assert verdict in str(found)
        assert len(found.warnings) == warned
    found = audited(100, tokens=3000, bandwidth=8 * MIB)
    assert found.tokens_per_second == pytest.approx(3000)  # 8 MiB are moved, in a second
    # A program is read and not run: no machine here could hold the arrays of this one.
    found = shd.audit(compiled(lambda x: x[:1].sum(), (2**22, 2**14)))
    assert found.arguments["batch and others"] == 4 * 2**36
    assert np.isfinite(found.memory)


def beginner(dtype=jnp.float32, donate=(0, 1), replicated=False, inputs=jnp.float32):
    """A step as one writes it first: lowered for 8 devices, its batch sharded."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    tx = optax.adam(1e-3)

    def step(params, opt_state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def place(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = {"w": jax.ShapeDtypeStruct((512, 256), dtype)}  # 512 KiB in float32
    state = jax.eval_shape(tx.init, params)
    over = P() if replicated else P("data")
    state = jax.tree.map(lambda x: place(x, over if x.ndim else P()), state)
    params = jax.tree.map(lambda x: place(x, P()), params)
    x = place(jax.ShapeDtypeStruct((64, 512), inputs), P("data"))
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    shardings = (*out, NamedSharding(mesh, P()))
    return jax.jit(step, donate_argnums=donate, out_shardings=shardings).lower(params, state, x)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        # A device's eighth of two moments, and all of the parameters.
        ({"donate": ()}, {"not donated": "640 KiB of parameters and optimizer state come back"}),
        ({"replicated": True}, {"replicated": "1.00 MiB of optimizer state are replicated: each"}),
        # The batch widens all.
        ({"dtype": jnp.bfloat16}, {"matrix products": "100% of the work of matrix products"}),
        ({"dtype": jnp.bfloat16, "inputs": jnp.bfloat16}, {}),
        ({}, {}),
    ],
)
def test_mistakes_of_a_first_step(options, warned):
    found = dict.fromkeys(("not donated", "replicated", "matrix products"), "")
    for text in shd.audit(beginner(**options)).warnings:
        found |= {key: text for key in found if key in text}
    assert {key for key, text in found.items() if text} == warned.keys()
    assert all(words in found[key] for key, words in warned.items())


def test_programs_that_do_not_say_how_arguments_are_placed():
    """As those of TPUs: the shardings of the compiled step do."""
    compiled = beginner(replicated=True).compile()
    text = compiled.as_text().replace("sharding={replicated}, ", "")
    shardings = jax.tree.leaves(compiled.input_shardings)

    def replicated(shardings):
        found, _ = arguments_of(Program(text), PARTS, shardings)
        return {each.name for each in found if each.replicated}

    state = {"opt_state[0].count", "opt_state[0].mu['w']", "opt_state[0].nu['w']"}
    assert replicated(shardings) == state | {"params['w']"}
    assert replicated([]) == replicated(shardings[1:]) == set()  # which is whose, nobody knows


def test_parameters_that_are_not_named_params():
    def step(theta, mu, x):
        g = jax.grad(lambda w: jnp.mean((x @ w["k"]) ** 2))(theta)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, g)
        return jax.tree.map(lambda w, m: w - 0.1 * m, theta, mu), mu

    tree = {"k": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(tree, tree, x).compile()
    found = shd.audit(program)
    size = 4 * 64 * 64
    assert found.arguments["parameters"] == found.arguments["optimizer state"] == size
    assert found.arguments["batch and others"] == 4 * 8 * 64
    (note,) = found.notes
    assert "of theta, mu: those that the loss reads" in note
    named = shd.audit(program, parts={"weights": "theta", "rest": ""})
    assert named.arguments == {"weights": size, "rest": size + 4 * 8 * 64}
    assert named.notes == ()


@pytest.mark.parametrize("loops", [False, True], ids=["a step", "a loop over steps"])
def test_state_of_any_name_is_what_the_update_alone_reads(loops):
    """Also through loops and conditionals; codes of low-bit state, but no counters and tokens."""
    steps = optax_ext.low_precision_state(optax.adam(1e-3), min_size=0)
    tx = optax.apply_if_finite(steps, 3)

    def step(state, tokens):
        def loss(p):
            p = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
            x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), p["embed"][tokens], p["w"])
            return jnp.mean(x.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(state["model"])
        updates, opt = tx.update(grads, state["opt"], state["model"])
        new = optax.apply_updates(state["model"], updates)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], new)
        return {"model": new, "opt": opt, "average": average}, value

    def run(state, tokens):
        return lax.scan(step, state, tokens) if loops else step(state, tokens)

    params = {"embed": jnp.ones((64, 32)), "w": jnp.ones((3, 32, 32))}
    state = {"model": params, "opt": tx.init(params), "average": params}
    lowered = jax.jit(run, donate_argnums=0).lower(state, jnp.zeros((2, 8), jnp.int32))
    found = shd.audit(lowered).arguments
    size = 4 * (64 * 32 + 3 * 32 * 32)
    assert found["parameters"] == size
    codes = sum(x.nbytes for x in jax.tree.leaves(tx.init(params)) if x.ndim and x.nbytes > 8)
    assert found["optimizer state"] == size + codes
    assert found["batch and others"] < 4 * 2 * 8 + 64


@needs_nnx
def test_a_step_of_nnx():
    """Lowered or compiled, as one of ``jax.jit``."""
    model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)

    lowered, size = step.lower(model, optimizer, jnp.ones((8, 32))), 4 * (32 * 16 + 16)
    for program in (lowered, lowered.compile()):
        found = shd.audit(program)
        assert found.arguments["parameters"] == size
        assert found.arguments["optimizer state"] == pytest.approx(2 * size, abs=16)
        assert found.arguments["batch and others"] == 4 * 8 * 32
    for wrong in (step, lowered.as_text()):
        with pytest.raises(ValueError, match=r"audit reads a program, got|without ENTRY"):
            shd.audit(wrong)


def needing(nbytes):
    """What makes, in place of a step, the audit of one that needs ``nbytes(batch)``."""
    audit = shd.audit(compiled(lambda x: x, (2,)))

    def make(batch):
        requested.append(batch)
        return dataclasses.replace(
            audit, arguments={"all": float(nbytes(batch))}, results=0.0, temporaries=0.0
        )

    requested = []
    return make, requested


@pytest.mark.parametrize(
    ("nbytes", "most"),
    [
        (lambda b: 100 + 7 * b, 7),  # as of most steps: a line is met at once
        (lambda b: 100 + 64 * -(-b // 64), 25),  # padded
        (lambda b: 50 * b**0.5, 15),
        (lambda b: b if b < 300 else 10_000 + b, 35),
    ],
)
@pytest.mark.parametrize(("memory", "unit"), [(10, 1), (1000, 1), (1000, 8), (20_000, 1)])
def test_find_batch(nbytes, most, memory, unit):
    make, requested = needing(nbytes)
    found = find_batch(make, memory=memory / 0.92, start=unit, limit=5000, unit=unit)
    fitting = [b for b in range(unit, 5001, unit) if nbytes(b) <= memory + 1e-6]
    assert found.batch == max(fitting, default=0)
    assert [each.batch for each in found.tried] == requested
    assert len(set(requested)) == len(requested) <= most
    assert [each.memory for each in found.tried] == list(map(nbytes, requested))
    assert found.complete == (found.batch < 5000)
    if found.batch:
        assert found.audit.memory == nbytes(found.batch)
        assert f"the largest batch that fits is {found.batch}" in str(found)
    else:
        assert found.audit is None
        assert f"no batch fits: {unit} needs" in str(found)


def test_find_batch_with_a_compiler_that_gives_up():
    """As those of TPUs do, saying what was needed or not."""

    def make(batch, text):
        if batch > 11:
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text.format(batch / 10)}")
        x = jax.ShapeDtypeStruct((batch, 12_800), jnp.float32)
        return jax.jit(lambda x: x * 2).lower(x)  # 102,400 bytes each

    for text in ("Used {}M of 1.0M hbm.", "no words"):
        found = find_batch(functools.partial(make, text=text), memory=2 * MIB, headroom=0)
        assert found.batch == 11
        failed = [each for each in found.tried if not each.fits]
        assert failed
        for each in failed:
            assert each.memory == (each.batch / 10 * MIB if "Used" in text else np.inf)

    def wrong(batch):
        raise jax.errors.JaxRuntimeError("INTERNAL: of another kind")

    with pytest.raises(jax.errors.JaxRuntimeError, match="of another kind"):
        find_batch(wrong, memory=1.0)


def test_bad_searches():
    with pytest.raises(ValueError, match="needs the memory of a device, and none is known of None"):
        find_batch(needing(lambda b: b)[0])
    with pytest.raises(ValueError, match=r"headroom must be from 0 to below 1, got 1.0"):
        find_batch(needing(lambda b: b)[0], memory=1.0, headroom=1.0)
    message = r"'abacus' .* known are v4, .*h200.* as a sharding\.DeviceKind"
    with pytest.raises(ValueError, match=message):
        shd.audit(path_of("cpu:8").read_text(), device="abacus")


@pytest.mark.parametrize(
    ("scope", "shown", "phase"),
    [
        ("jit(step)/shard_map/jvp()/while/body/closed_call/gather/all_gather",
         "gather/all_gather", "gather"),
        ("jit(step)/shard_map/loss_and_grad/jvp(gather)/all_gather", None, "gather"),
        ("jit(f)/jvp(jit(take_along_axis))/gather", None, "forward"),  # a lookup
        ("jit(f)/checkpoint/rematted_computation/dot_general", None, "backward"),
        ("jit(step)/transpose(jvp(a/b))/reduce_sum", "b/reduce_sum", "backward"),
        # XLA made one of two.
        ("jit(f)/(transpose(jvp(a/b))/dot_general:jvp(a/b)/reduce_sum)",
         "b/dot_general", "backward"),
        ("jit(step)/transpose(jvp(gather))/reduce_scatter", "reduce_scatter", "gradient sync"),
        ("jit(step)/update/reduce_sum", "update/reduce_sum", "update"),
        ("jit(f)/add", None, "other"),
    ],
)  # fmt: skip
def test_phases_and_scopes(scope, shown, phase):
    """Scopes are shown by their ends."""
    assert phase_of(scope) == phase
    if shown is not None:
        assert shortened(scope) == shown


def test_products_of_8_bits_have_their_own_row_and_rate():
    text = """HloModule low

ENTRY %main (a: s8[64,64], b: bf16[64,64]) -> (s32[64,64], bf16[64,64]) {
  %a = s8[64,64]{1,0} parameter(0)
  %b = bf16[64,64]{1,0} parameter(1)
  %c = s32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d = bf16[64,64]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %e = (s32[64,64]{1,0}, bf16[64,64]{1,0}) tuple(%c, %d)
}
"""
    found = shd.audit(text, device="v5e:1x1")
    each = 2.0 * 64**3
    rows = {row.on[0]: row.amount for row in found.ledger().work if row.op == "products"}
    assert rows == {"flops": each, "int8": each}
    assert found.matmul_flops == 2 * each
    assert found.seconds["compute"] == pytest.approx(each / 197e12 + each / 393e12)
    assert "products in int8" in str(found)
    assert shd.audit(text, device="tpu7x:2x2x1").seconds["compute"] == pytest.approx(
        2 * each / (2307e12 / 2)  # a device that has none of a known rate
    )
