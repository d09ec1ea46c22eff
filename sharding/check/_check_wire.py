"""Checks of collectives: each form that a step uses, on a mesh of all devices, beside NumPy."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import sync
from sharding.check._check_numbers import apart
from sharding.check._machine_report import MachineCheck, NotHere, Slow
from sharding.collectives._reduce_scatter import dequantize, psum_scatter, quantize

_SYNCS = {
    "dense": sync.dense(),
    "qsgd(8)": sync.qsgd(8, min_size=1),
    "powersgd(4)": sync.powersgd(4, min_compression=1.0),
    "gradzip(4)": sync.gradzip(4, min_compression=1.0),
    "top_k(0.1)": sync.top_k(0.1, min_size=1),
    "zen(0.1)": sync.zen(0.1),
    "agsparse(0.1)": sync.agsparse(0.1),
}
_SCATTERS = ("native", "ring", "all_to_all")
_SHARDED = P("data")
_LAYERS = "ZeRO's gathers and reduce-scatters of this mesh"


def mesh_of_all(*, split: int = 1) -> jax.sharding.Mesh:
    """All devices on an axis "data", or on "replica" of ``split`` and "data"."""
    num = jax.device_count()
    if num == 1:
        raise NotHere("one device alone sends nothing")
    if num % split:
        raise NotHere(f"{num} devices are not divided by {split}")
    shape = (num,) if split == 1 else (split, num // split)
    names = ("replica", "data")[-len(shape) :]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def wire_checks() -> Iterator[MachineCheck]:
    """Of all devices together."""
    for form in _SCATTERS:
        yield MachineCheck(
            f"wire: reduce-scatter, form {form!r}",
            functools.partial(_compare_reduce_scatter, form),
            _LAYERS,
            "Zero(stage=0), whose all-reduce is another collective",
        )
    yield MachineCheck(
        "wire: time of a step's reduce-scatter beside other forms",
        _compare_times,
        _LAYERS,
        "a larger batch or fewer devices hide it",
    )
    for dtype in (jnp.float32, jnp.bfloat16):
        name = jnp.dtype(dtype).name
        yield MachineCheck(
            f"wire: all-gather, {name}",
            functools.partial(_compare_gather, dtype),
            _LAYERS,
            "Zero(stage=0)",
        )
    yield MachineCheck(
        "wire: permutation to the next device",
        _compare_permutation,
        "pipelines, and copies in peers' memory",
        "one stage, and checkpoints by orbax",
    )
    for bits in (8, 4):
        yield MachineCheck(
            f"wire: all-gather of int{bits} codes",
            functools.partial(_compare_gather_of_codes, bits),
            f'Precision(gather="int{bits}")',
            "Precision(gather=None)",
        )
    for name in _SYNCS:
        yield MachineCheck(
            f"wire: mean by sync.{name}",
            functools.partial(_compare_sync, name),
            f"Zero(sync=sync.{name})",
            "Zero(sync=None)",
        )


def _run_on_devices(fn: Callable[..., Any], x: np.ndarray, out: P = _SHARDED) -> jax.Array:
    """What a function of each device's row of x (devices, ...) returns; blocks of this process."""
    run, placed = _on_devices(fn, x, out)
    return run(placed)


def _on_devices(fn: Callable[..., Any], x: np.ndarray, out: P) -> tuple[Any, jax.Array]:
    """A program of a function of each device's row, and the rows."""
    mesh = mesh_of_all()
    placed = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("data")), lambda at: x[at])
    run = jax.shard_map(fn, mesh=mesh, in_specs=P("data"), out_specs=out, check_vma=False)
    return jax.jit(run), placed


def worst_block(have: jax.Array, want: np.ndarray) -> float:
    """The largest difference of a block that this process has."""
    return max(apart(shard.data, want[shard.index]) for shard in have.addressable_shards)


def _rows_of_devices(*shape: int) -> np.ndarray:
    """(devices, ...), of full rank; devices differ in scale."""
    num = jax.device_count()
    x = np.random.default_rng(0).standard_normal((num, *shape))
    scale = 2.0 ** (np.arange(num) % 5 - 2)
    return (x * scale.reshape(-1, *[1] * len(shape))).astype(np.float32)


def _compare_reduce_scatter(form: str) -> float:
    num = jax.device_count()
    x = _rows_of_devices(num * 16, 256)
    have = _run_on_devices(lambda x: psum_scatter(x[0], "data", -2, form), x)
    return worst_block(have, x.astype(np.float64).sum(0)) / 1e-5


def _compare_times() -> float:
    """Of the form that steps choose and all others, by the fastest of five calls: three times."""
    x = _rows_of_devices(jax.device_count() * -(-256 // jax.device_count()), 1024)
    seconds = {form: _seconds_of_scatter(form, x) for form in (None, *_SCATTERS)}
    best = min(_SCATTERS, key=lambda form: seconds[form])
    if seconds[None] > 3 * seconds[best]:
        mine, other = (f"{1e3 * seconds[form]:.3g} ms" for form in (None, best))
        raise Slow(f"it takes {mine}, form {best!r} {other}")
    return seconds[None] / seconds[best] / 3


def _seconds_of_scatter(form: str | None, x: np.ndarray) -> float:
    run, placed = _on_devices(lambda x: psum_scatter(x[0], "data", -2, form), x, _SHARDED)
    times = []
    for _ in range(6):  # the first compiles
        start = time.perf_counter()
        jax.block_until_ready(run(placed))
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _compare_gather(dtype: Any) -> float:
    x = _rows_of_devices(16, 256).astype(dtype)
    have = _run_on_devices(lambda x: lax.all_gather(x[0], "data", tiled=True), x, P())
    return worst_block(have, x.reshape(-1, 256)) / 1e-12


def _compare_permutation() -> float:
    x, num = _rows_of_devices(64, 64), jax.device_count()
    pairs = [(i, (i + 1) % num) for i in range(num)]
    have = _run_on_devices(lambda x: lax.ppermute(x, "data", pairs), x)
    return worst_block(have, np.roll(x, 1, 0)) / 1e-12


def _compare_gather_of_codes(bits: int) -> float:
    """Against the values that codes have on the device that sends them, and within half a step."""
    x, block = _rows_of_devices(1, 4096), 512

    def gather(x: jax.Array) -> jax.Array:
        codes, scales = (lax.all_gather(p, "data", tiled=True) for p in quantize(x[0], bits, block))
        return dequantize(codes, scales, bits, block)

    levels = 2 ** (bits - 1) - 1
    blocks = x.reshape(len(x), -1, block)
    step = np.abs(blocks).max(-1, keepdims=True) / levels
    want = (np.round(blocks / step) * step).reshape(len(x), -1)
    have = _run_on_devices(gather, x, P())
    return worst_block(have, want) / (1e-3 if bits == 8 else 1e-2)


def _compare_sync(name: str) -> float:
    """Of three steps: what means and residuals add up to is the sum of all gradients."""
    method, x = _SYNCS[name], _rows_of_devices(64, 64)
    if name in ("zen(0.1)", "agsparse(0.1)"):
        x[:, np.arange(64) % 10 != 3] = 0  # rows that no device reads

    def three(x: jax.Array) -> Any:
        def step(carry: Any, scale: jax.Array) -> Any:
            state, sent = carry
            mean, state = method.all_reduce({"w": x[0] * scale}, state, "data")
            return (state, sent + mean["w"]), None

        start = method.init({"w": x[0]}), jnp.zeros_like(x[0])
        (state, sent), _ = lax.scan(step, start, jnp.arange(1.0, 4.0))
        left = state.arrays["w"]
        left = left["error"] if isinstance(left, dict) else jnp.zeros_like(sent)
        return sent + lax.pmean(left, "data")

    want = 6 * x.astype(np.float64).mean(0)
    allowed = 0.02 if name == "qsgd(8)" else 1e-5  # what codes round is in no residual
    return worst_block(_run_on_devices(three, x, P()), want) / allowed
