"""Wire bytes equal the closed form, on compiled programs and on excerpts of other compilers'."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import P, lax
from jax.sharding import AxisType

from sharding.plan import audit
from sharding.plan.audit._program_collectives import collectives, wire_bytes

SIZE = 16 * 24  # elements on one device
FULL = 4 * SIZE


def program(step, *more):
    """A compiled step on (16, 24) for each of 8 devices."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    args = (jax.ShapeDtypeStruct((8 * 16, 24), jnp.float32), *more)
    specs = (P("a"), *(P() for _ in more))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("a"), check_vma=False)
    return jax.jit(mapped).lower(*args).compile()


def rotate(x):
    return lax.ppermute(x, "a", [(i, (i + 1) % 8) for i in range(8)])


@pytest.mark.usefixtures("scopes_in_cache_key")
@pytest.mark.parametrize(
    ("op", "step", "expected"),
    [
        ("all-reduce", lambda x: lax.psum(x, "a"), 2 * 7 / 8 * FULL),
        ("reduce-scatter", lambda x: lax.psum_scatter(x, "a", tiled=True), 7 / 8 * FULL),
        ("all-gather", lambda x: lax.all_gather(x, "a", tiled=True), 7 * FULL),
        ("all-to-all", lambda x: lax.all_to_all(x, "a", 0, 0, tiled=True), 7 / 8 * FULL),
        ("collective-permute", rotate, FULL),
    ],
)
def test_one_collective(op, step, expected):
    compiled = program(step)
    (found,) = collectives(compiled)
    assert (found.op, found.dtype, found.runs, found.wire_bytes) == (op, "f32", 1, expected)
    assert found.elements == (8 * SIZE if op == "all-gather" else SIZE)
    assert found.scope
    assert wire_bytes(compiled) == expected


def test_the_dearest_branch():
    def step(x, k):
        return lax.cond(k > 0, lambda x: lax.psum(x, "a"), rotate, x)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    assert wire_bytes(program(step, number)) == 2 * 7 / 8 * FULL


def test_unknown_trip_count():
    def step(x, k):
        return lax.fori_loop(0, k, lambda _, x: rotate(x), x)

    compiled = program(step, jax.ShapeDtypeStruct((), jnp.int32))
    with pytest.raises(ValueError, match=r"does not say how often the loop %while\S* runs"):
        wire_bytes(compiled)
    # An audit counts it once, and says so.
    found = audit(compiled)
    assert found.wire_bytes == wire_bytes(program(rotate))
    (said,) = found.of_compiler
    assert re.search(r"how often the loop %while\S* runs is unknown: counted once", said)
    assert said in found.warnings


# What follows was compiled for TPUs and GPUs and shortened by hand.
def entry(*lines, before=""):
    header = "HloModule jit_f, is_scheduled=true, num_partitions=16\n"
    body = "\n".join(f"  {line}" for line in lines)
    return f"{header}\n{before}\nENTRY %main (p: f32[64,8]) -> f32[8] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("[4,2]<=[8]", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("[2,4]<=[4,2]T(1,0)", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("mesh['data'=16] {'data'}", [tuple(range(16))]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['a'=8] {'a':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [(3, 2), (1, 0)]),
        ("{}", [tuple(range(16))]),
    ],
)
def test_notations_of_groups(notation, groups):
    text = entry(
        "%p = f32[64,8]{1,0:T(8,128)} parameter(0)",
        f"ROOT %r = f32[64,8]{{1,0:T(8,128)S(1)}} all-reduce(%p), replica_groups={notation}, "
        "use_global_device_ids=true, to_apply=%add",
    )
    (found,) = collectives(text)
    n = len(groups[0])
    assert (found.group_size, found.groups) == (n, tuple(groups))
    assert found.wire_bytes == 2 * (n - 1) / n * 64 * 8 * 4


def test_pairs_of_start_and_done():
    text = entry(
        "%p = bf16[64,8]{1,0} parameter(0)",
        "%q = s4[64]{0} parameter(1)",
        "%s = ((bf16[64,8]{1,0}, s4[64]{0}), (bf16[4,8]{1,0}, s4[4]{0})) "
        "reduce-scatter-start(%p, %q), replica_groups={{0,1}}, dimensions={0}, to_apply=%add",
        "%d = (bf16[4,8]{1,0}, s4[4]{0}) reduce-scatter-done(%s)",
        "%g = (bf16[64,8]{1,0}, bf16[128,8]{1,0}) all-gather-start(%p), replica_groups={{0,1}}",
        "%e = bf16[128,8]{1,0} all-gather-done(%g)",
        "%c = ((s4[64]{0}), s4[64]{0}) async-start(%q), calls=%wrapped",
        "ROOT %f = s4[64]{0} async-done(%c), calls=%wrapped",
        before="%wrapped (x: s4[64]) -> s4[64] {\n  %x = s4[64]{0} parameter(0)\n"
        "  ROOT %a = s4[64]{0} all-to-all(%x), replica_groups={{0,1}}\n}\n",
    )
    found = collectives(text)
    assert [each.op for each in found] == ["reduce-scatter", "all-gather", "all-to-all"]
    assert [each.dtype for each in found] == ["bf16+s4", "bf16", "s4"]
    assert [each.wire_bytes for each in found] == [1024 / 2 + 32 / 2, 1024, 16]


def test_all_reduce_scatter_of_tpu():
    text = entry(
        "%p = f32[64,8]{1,0} parameter(0)",
        "ROOT %fusion = f32[4,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1",
        before="%all-reduce-scatter.1 (input: f32[64,8]) -> f32[4,8] {\n"
        "  %input = f32[64,8]{1,0:T(8,128)S(1)} parameter(0)\n"
        "  %all-reduce.4 = f32[64,8]{1,0} all-reduce(%input), replica_groups={}, to_apply=%add\n"
        "  ROOT %d = f32[4,8]{1,0} dynamic-slice(%all-reduce.4), dynamic_slice_sizes={4,8}\n}\n",
    )
    (found,) = collectives(text)
    assert (found.op, found.wire_bytes) == ("reduce-scatter", 15 / 16 * 64 * 8 * 4)


def test_a_gather_of_tpu_that_goes_on_inside_of_a_callee():
    gather = (
        "  %x = f32[64,8]{1,0} parameter(0)\n  ROOT %g = f32[128,8]{1,0} all-gather(%x), "
        'replica_groups={{0,1}}, frontend_attributes={chain_id="7"}\n}\n'
    )
    text = entry(
        "%p = f32[64,8]{1,0} parameter(0)",
        "%async-collective-start.1 = f32[128,8]{1,0} fusion(%p), kind=kCustom, calls=%first",
        "ROOT %c = f32[128,8]{1,0} call(%p), to_apply=%body",
        before=f"%first (x: f32[64,8]) -> f32[128,8] {{\n{gather}"
        f"%async_collective_fusion.2 (x: f32[64,8]) -> f32[128,8] {{\n{gather}"
        "%body (y: f32[64,8]) -> f32[128,8] {\n  %y = f32[64,8]{1,0} parameter(0)\n  ROOT %f = "
        "f32[128,8]{1,0} fusion(%y), kind=kLoop, calls=%async_collective_fusion.2\n}\n",
    )
    assert [each.wire_bytes for each in collectives(text)] == [64 * 8 * 4]


@pytest.mark.parametrize(
    ("kind", "target", "n", "factor"),
    [
        ("ALL_REDUCE", '"{1,2}x{0:15}"', 2, 1.0),
        ("REDUCE_SCATTER", '"{1,2,3,4}x{0:15}"', 4, 3 / 4),
        ("ALL_TO_ALL", "{{100000,100001,200000,200001}}", 4, 3 / 4),
        ("ONE_TO_ONE", "{{100004->200000},{200004->100000}}", 2, 1.0),
    ],
)
def test_transfers_between_slices(kind, target, n, factor):
    text = entry(
        "%p = f32[64,8]{1,0} parameter(0)",
        "%after = token[] after-all()",
        "%send = (f32[64,8]{1,0}, u32[], token[]) send(%p, %after), channel_id=2, "
        "is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="
        f'"xla_megascale_runtime",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{kind}"}}',
        "ROOT %done = token[] send-done(%send), is_host_transfer=true",
    )
    (found,) = collectives(text)
    assert found.across_slices
    assert (found.group_size, found.wire_bytes) == (n, factor * 64 * 8 * 4)


def test_what_has_no_cost_raises():
    text = entry(
        "%p = f32[64,8]{1,0} parameter(0)",
        "ROOT %r = f32[64,8]{1,0} ragged-all-to-all(%p, %p), replica_groups={}",
    )
    with pytest.raises(ValueError, match="ragged-all-to-all"):
        wire_bytes(text)
    with pytest.raises(ValueError, match="ENTRY"):
        wire_bytes("HloModule empty")
