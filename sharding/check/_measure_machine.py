"""``measure_machine``: the rates of this machine, for plans in the place of data sheets."""

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.check._machine_report import describe_machine
from sharding.plan.machine import targets
from sharding.plan.machine._measured_rates import MeasuredRates, WireTime
from sharding.plan.model._models import Decoder
from sharding.plan.model._traced_work import UNIT, work_of
from sharding.plan.search._fit_request import machine_name, of_all

_TRIES = 5  # whose median counts
_LEAST = 0.02  # seconds of a program, of which a start is a small share
_MOST = 2**12  # operations of a program
_LONG = 0.05  # seconds of one operation, above which no larger one is measured
_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")  # the last one not on CPUs, which have none
_PRODUCTS = tuple(2**i for i in range(6, 14))  # rows and columns
_CHANNELS = tuple(2**i for i in range(3, 10))
_PASSES = tuple(2**i for i in range(16, 29, 3))  # bytes that one reads
_WIRE = tuple(2**i for i in range(12, 29, 4))  # bytes
_ROWS = jax.ShapeDtypeStruct((32, 1024, 1024), jnp.float32)  # of element-wise operations

Body = Callable[..., Any]  # of one device's arrays: as many arrays of the same types


def measure_machine(
    progress: Callable[[str], object] = lambda text: None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredRates:
    """Measures the devices of this machine: products, memory, each axis of the mesh, the host.

    All devices work at the same time, as in a step. Each operation runs in a loop of one program,
    and the median of five tries counts; sizes grow until one operation would take 0.05 s. With
    several processes all of them call it, at the same time. Nothing else should run.

    Args:
      progress: a function of what is measured next.
      clock: seconds so far, such as of the CPU alone where others use it, too.

    Returns:
      The rates: ``write`` them to a file, which ``DeviceKind.read`` and ``--machine`` take.
    """
    rates = _Meter(clock)
    # XLA for CPUs has slower forms of gradients of convolutions in loops.
    alone = _Meter(clock, 1) if jax.default_backend() == "cpu" else rates
    progress("memory")
    kernel = rates.seconds(_move, (256,))
    passes = []
    for nbytes in _PASSES:
        passes.append((2.0 * nbytes, rates.seconds(_move, (nbytes // 4,))))
        if 8 * passes[-1][1] > _LONG:  # what the next one takes
            break
    products, convolutions = {}, {}
    for dtype in _DTYPES[: 2 if jax.default_backend() == "cpu" else 3]:
        progress(f"products in {dtype}")
        products[dtype] = _products(rates, dtype)
        if dtype == "float32":  # next to the products that are subtracted
            n, seconds = products[dtype][-1]
            elementwise = _elementwise(rates, 2 * n**3 / seconds)
        if jnp.dtype(dtype).itemsize > 1:
            convolutions[dtype] = _convolutions(alone, dtype)
    name = machine_name(jax.devices())
    wire = []
    for axis, size in targets.parse(name, other_gpus=True).mesh_axes.items():
        progress(f"collectives over {axis}")
        wire += _wire_times(rates, axis, size) if size > 1 else []
    progress("the link to the host")
    return MeasuredRates(
        target=name,
        about=describe_machine(),
        memory=_memory(),
        kernel=kernel,
        passes=passes,
        elementwise=elementwise,
        products=products,
        wire=wire,
        host_link=_host_link(clock),
        convolutions=convolutions,
        new_memory=_new_memory(alone),
    )


class _Meter:
    """Seconds of an operation on all devices at once."""

    def __init__(self, clock: Callable[[], float], most: int = _MOST):
        self.clock, self.most = clock, most
        name = machine_name(jax.devices())
        axes = targets.parse(name, other_gpus=True).mesh_axes
        types = (AxisType.Auto,) * len(axes)
        self.mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), types)
        self.spec = P(self.mesh.axis_names)

    def seconds(
        self,
        body: Body,
        *shapes: tuple[int, ...],
        dtype: Any = jnp.float32,
        in_place: bool = True,
    ) -> float:
        """Of one call of ``body`` in a loop, by arrays of these shapes on each device."""
        num = self.mesh.size

        def make() -> tuple[jax.Array, ...]:
            drawn = [jax.random.normal(jax.random.key(i), (num, *x)) for i, x in enumerate(shapes)]
            return tuple((x / np.sqrt(x.shape[-1])).astype(dtype) for x in drawn)

        make_there = jax.jit(make, out_shardings=NamedSharding(self.mesh, self.spec))
        count = 1
        while True:
            run = self._compile(body, count, make_there(), in_place)
            took = self._median(run, 2)
            if took >= _LEAST / 2 or count >= self.most:
                return self._median(run, _TRIES) / count
            count = min(self.most, count * int(np.ceil(_LEAST / max(took, _LEAST / 256))))

    def _compile(
        self, body: Body, count: int, arrays: tuple[jax.Array, ...], in_place: bool
    ) -> Body:
        def loop(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            def once(_: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                return tuple(jax.tree.leaves(body(*carry)))

            start = tuple(x[0] for x in blocks)
            found = once(0, start) if self.most == 1 else lax.fori_loop(0, count, once, start)
            return tuple(x[None] for x in found)

        at = self.spec
        mapped = jax.shard_map(loop, mesh=self.mesh, in_specs=at, out_specs=at, check_vma=False)
        donated = tuple(range(len(arrays) * in_place))  # new memory costs page faults on CPUs
        compiled = jax.jit(mapped, donate_argnums=donated).lower(*arrays).compile()
        held = [arrays]

        def run() -> None:
            made = jax.block_until_ready(compiled(*held[0]))
            held[0] = made if in_place else held[0]

        run()
        return run

    def _median(self, run: Body, tries: int) -> float:
        """The same in all processes, which decide by it what they run next."""
        times = []
        for _ in range(tries):
            start = self.clock()
            run()
            times.append(self.clock() - start)
        found = statistics.median(times)
        return float(np.max(of_all(found))) if jax.process_count() > 1 else found


def _move(x: jax.Array) -> jax.Array:
    return x * 0.999 + 1e-9


def _new_memory(rates: _Meter) -> float:
    """Seconds of each byte that a program gets from the system; accelerators keep their memory."""
    if jax.default_backend() != "cpu":
        return 0.0
    new, own = (rates.seconds(_move, (2**24,), in_place=x) for x in (False, True))
    return max(new - own, 0.0) / 2**26


def _elementwise(rates: _Meter, product: float) -> float:
    """Bytes a second of a norm, a softmax and an activation with their gradients.

    As the planner counts bytes. On CPUs of a step of a small decoder but its products, each of so
    many operations a second: activations leave the caches, memory is new, operands are transposed.
    """
    decoder = Decoder(4, 256, 4, 4, 1024, 2048, 256, gated=False, tied=True, biased=True)
    is_cpu = jax.default_backend() == "cpu"
    types, tree = jax.tree.flatten(decoder.abstract() if is_cpu else _ROWS)

    def forward(x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, -1, keepdims=True)
        x = (x - mean) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
        return jax.nn.softmax(jax.nn.gelu(x))

    def step(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        if is_cpu:
            tokens = jnp.arange(4 * 257, dtype=jnp.int32).reshape(4, 257)
            found = jax.tree.leaves(jax.grad(decoder.make_loss())(tree.unflatten(leaves), tokens))
        else:
            y, back = jax.vjp(forward, *leaves)
            found = back(y)
        return tuple(x + 1e-6 * dx for x, dx in zip(leaves, found, strict=True))

    work = work_of(step, *types, kind=UNIT)
    seconds = rates.seconds(step, *(x.shape for x in types))
    return work.seconds / max(seconds - work.flops / product, seconds / 10)


def _products(rates: _Meter, dtype: str) -> list[tuple[int, float]]:
    """Rows of square matrices, and the seconds of a product, the mean of it and its gradient's."""
    wide = jnp.float32 if jnp.dtype(dtype).itemsize == 1 else None
    dot = functools.partial(jnp.dot, preferred_element_type=wide)

    def forward_and_backward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y = dot(x, w).astype(dtype)
        dx, dw = dot(y, w.T), dot(x.T, y)
        # So that all are computed, and values stay.
        return tuple(a + (1e-6 * b).astype(dtype) for a, b in ((x, dx), (w, dw)))

    found = []
    for n in _PRODUCTS:
        seconds = rates.seconds(forward_and_backward, (n, n), (n, n), dtype=dtype) / 3
        found.append((n, seconds))
        if 8 * 3 * seconds > _LONG:  # what the next one takes
            break
    return found


def _convolutions(rates: _Meter, dtype: str) -> list[tuple[float, float, float]]:
    """Operations, bytes and seconds of one of 4 images of 32 x 32, the mean with its gradient's."""

    def one(x: jax.Array, w: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)

    def forward_and_backward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(one, x, w)
        return tuple(a + (1e-6 * b).astype(dtype) for a, b in zip((x, w), back(y), strict=True))

    found = []
    for n in _CHANNELS:
        seconds = rates.seconds(forward_and_backward, (4, 32, 32, n), (3, 3, n, n), dtype=dtype) / 3
        nbytes = jnp.dtype(dtype).itemsize * (2 * 4 * 32 * 32 * n + 9 * n * n)
        found.append((2.0 * 4 * 32 * 32 * 9 * n * n, float(nbytes), seconds))
        if 4 * 3 * seconds > _LONG:
            break
    return found


def _wire_times(rates: _Meter, axis: str, size: int) -> list[WireTime]:
    """Each by its sizes, of the full array or of the operand of an all-to-all or permutation."""

    def gather(x: jax.Array) -> jax.Array:  # the neighbour's block, which no compiler shortens
        full = lax.all_gather(x, axis, tiled=True)
        at = (lax.axis_index(axis) + 1) % size
        return lax.dynamic_slice_in_dim(full, at * len(x), len(x))

    def scatter_and_gather(x: jax.Array) -> jax.Array:
        mine = lax.psum_scatter(x, axis, tiled=True) * (1 / size)
        return jnp.roll(lax.all_gather(mine, axis, tiled=True), len(mine))

    to_next = [(i, (i + 1) % size) for i in range(size)]
    bodies: dict[str, tuple[Body, int]] = {
        "all-gather": (gather, size),
        "reduce-scatter": (scatter_and_gather, 1),
        "all-reduce": (lambda x: lax.psum(x, axis) * (1 / size), 1),
        "all-to-all": (lambda x: lax.all_to_all(x, axis, 0, 0, tiled=True), 1),
        "permute": (lambda x: lax.ppermute(x, axis, to_next), 1),
    }
    found: list[WireTime] = []
    for operation, (body, shares) in bodies.items():
        gathers = {row.nbytes: row.seconds for row in found}  # the first of the bodies
        for nbytes in _WIRE:
            rows = nbytes // 4 // size // shares * size
            seconds = rates.seconds(body, (max(rows, size),))
            if operation == "reduce-scatter":
                seconds = max(seconds - gathers.get(nbytes, seconds / 2), seconds / 8)
            found.append(WireTime(axis, operation, float(nbytes), seconds))
            if 16 * seconds > _LONG:
                break
    return found


def _memory() -> float:
    """Of a device, in bytes; on CPUs its share of the machine's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    pages = os.sysconf("SC_PHYS_PAGES")
    return os.sysconf("SC_PAGE_SIZE") * pages / jax.local_device_count()


def _host_link(clock: Callable[[], float]) -> float | None:
    """Bytes a second of each device, the slower of both ways; None on CPUs."""
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return None
    place = [jax.sharding.SingleDeviceSharding(device) for device in devices]
    host = [x.with_memory_kind("pinned_host") for x in place]
    arrays = jax.block_until_ready([jax.device_put(jnp.ones(2**26), x) for x in place])
    seconds = []
    for target in _TRIES * (host, place):  # there and back
        start = clock()
        arrays = jax.block_until_ready(jax.device_put(arrays, target))
        seconds.append(clock() - start)
    return 4 * 2.0**26 / max(statistics.median(seconds[way::2]) for way in (0, 1))
