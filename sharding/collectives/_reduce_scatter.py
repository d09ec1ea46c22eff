"""Reduce-scatter in several forms: what ``lax.psum_scatter`` compiles to depends on the target."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._array_layout import ArrayLayout, on_each
from sharding.placement._layout import Layout
from sharding.placement._specs import Axes, Axis, axes_of

# Both ways together. Chosen, not measured: what a step waits for shows in no program.
_MIN_STEP_BYTES = 1 << 16
# Of a TPU's registers.
LANES = 128
FORMS = ("native", "axes", "ring", "all_to_all")


def psum_scatter(x: jax.Array, axis: Axis, dim: int, form: str = "native") -> jax.Array:
    """Sums over mesh axes and keeps one piece, for use inside a ``shard_map`` manual over them.

    Equals ``lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)`` up to the order of the
    sum; along a tuple of axes devices count in row-major order.

    Args:
      x: one array on every device, with ``ndim >= 1``.
      axis: the mesh axis, or axes.
      dim: the dim that is cut; its size is a multiple of the number of devices.
      form: ``"native"``, what XLA makes of ``lax.psum_scatter``; ``"axes"``, over one mesh axis
        after the other; ``"ring"``, neighbour to neighbour, half of every piece each way round;
        ``"all_to_all"``, an exchange and a local sum (in float32 for narrower floats).

    Returns:
      The piece of the sum that is this device's, of the dtype of ``x``.

    Raises:
      ValueError: the form is unknown, or the dim does not divide.
    """
    names = axes_of(axis)
    num = math.prod(lax.axis_size(name) for name in names)
    dim %= x.ndim
    if x.shape[dim] % num:
        raise ValueError(
            f"dim {dim} of shape {x.shape} cannot be cut over {num} devices of axis {axis!r}; "
            f"pad it to a multiple of {num}"
        )
    if form == "native":
        return lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
    if form == "axes":
        return _axes(x, names, dim)
    if form == "ring":
        return x if num == 1 else _ring(x, names, num, dim)
    if form == "all_to_all":
        return _all_to_all(x, names, num, dim)
    raise ValueError(f"unknown form {form!r}; known are {', '.join(FORMS)}")


def scatter_sum(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """``psum_scatter`` in the form that suits the devices of the ``shard_map`` around it."""
    axes = axes_of(axis)
    sizes = [lax.axis_size(name) for name in axes]
    return psum_scatter(x, axes, dim, choose_form(platform(), sizes, x.shape, dim, x.dtype))


def platform() -> str:
    """That of the devices of the ``shard_map`` around it."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "unknown" if device is None else device.platform


def choose_form(
    platform: str, axis_sizes: Sequence[int], shape: Sequence[int], dim: int, dtype: Any
) -> str:
    """The form that sends no more than a reduce-scatter must, in the fewest steps.

    From the programs of ``benchmarks/results/scatter_forms.md``: on TPUs ``lax.psum_scatter``
    mostly becomes a full all-reduce, except over one axis of the torus after the other; there too
    where pieces of the last dim are narrower than a register. Over one flat axis a ring sends the
    least and needs no room, but waits n - 1 times; where what it sends in a step is small, one
    exchange sends as much at once.

    Args:
      platform: ``jax.Device.platform``: ``"tpu"``, ``"gpu"``, ``"cpu"``.
      axis_sizes: the size of each mesh axis that is summed over.
      shape: of the array on one device.
      dim: the dim that is cut.
      dtype: of the array.
    """
    sizes = [size for size in axis_sizes if size > 1]
    if platform != "tpu" or not sizes:
        return "native"
    if len(sizes) > 1:
        last = 0 < dim % len(shape) == len(shape) - 1
        return "all_to_all" if last and shape[-1] // math.prod(sizes) < LANES else "axes"
    sent = math.prod(shape) * jnp.dtype(dtype).itemsize // sizes[0]
    return "ring" if sent >= _MIN_STEP_BYTES else "all_to_all"


def reduce_scatter(
    layout: Layout, axes: tuple[str, ...], xs: Sequence[jax.Array], cuts: Sequence[ArrayLayout]
) -> list[jax.Array]:
    """Sums over manual axes; each device keeps its part, and the whole of what is not cut."""

    def reduce(x: jax.Array, dim: int) -> jax.Array:
        if not dim:
            return lax.psum(x, axes)
        return psum_scatter(x, axes, dim, scatter_form(layout, axes, x, dim))

    return on_each(layout, reduce, xs, cuts)


def scatter_form(layout: Layout, axes: tuple[str, ...], x: jax.Array, dim: int) -> str:
    """In which form one dim of an array is reduce-scattered over ``axes``."""
    if layout.scatter != "auto":
        return layout.scatter
    sizes = [layout.mesh.shape[axis] for axis in axes]
    return choose_form(layout.platform, sizes, x.shape, dim, x.dtype)


def own_piece(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This device's piece of an array along a dim."""
    dim %= x.ndim
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


def _axes(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Scatters over the first axis, then what it left over the next: row-major order."""
    if 0 < dim >= x.ndim - 2:
        for name in names:
            x = lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)
        return x
    # TPU compilers scatter whole leading dims as they are. Of other dims before the last two, which
    # are those of the tiles in memory, they would make an all-reduce; and again, by undoing the
    # transpose, if more than one dim were left between.
    sizes = [lax.axis_size(name) for name in names]
    shape = (*x.shape[:dim], x.shape[dim] // math.prod(sizes), *x.shape[dim + 1 :])
    x = x.reshape(*shape[:dim], *sizes, *shape[dim:])
    x = jnp.moveaxis(x, range(dim, dim + len(sizes)), range(len(sizes)))
    if dim:
        x = x.reshape(*sizes, -1, shape[-1])
    for name in names:
        x = lax.psum_scatter(x, name, scatter_dimension=0, tiled=False)
    return x.reshape(shape)


def _ring(x: jax.Array, names: tuple[str, ...], num: int, dim: int) -> jax.Array:
    """Sums that travel: half of every piece upward round the ring, half downward."""
    me = lax.axis_index(names)
    size = x.shape[dim] // num
    up = size // 2  # a piece of one row goes downward whole

    def half(step: int, piece: jax.Array) -> jax.Array:
        start, length = (0, up) if step > 0 else (up, size - up)
        return lax.dynamic_slice_in_dim(x, piece % num * size + start, length, dim)

    def body(i: jax.Array, sums: dict[int, jax.Array]) -> dict[int, jax.Array]:
        return {
            step: lax.ppermute(sent, names, [(j, (j + step) % num) for j in range(num)])
            + half(step, me - step * (i + 2))
            for step, sent in sums.items()
        }

    # A sum moves on num - 1 times before it is at home, so it starts one place behind its home.
    steps = (1, -1) if up else (-1,)
    sums = {step: half(step, me - step) for step in steps}
    sums = lax.fori_loop(0, num - 1, body, sums)
    return lax.concatenate([sums[step] for step in steps], dim)


def _all_to_all(x: jax.Array, names: tuple[str, ...], num: int, dim: int) -> jax.Array:
    """Every device is sent its piece by every other and sums what it has got."""
    x = lax.all_to_all(x, names, split_axis=dim, concat_axis=dim, tiled=True)
    pieces = x.reshape(*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return jnp.sum(pieces, dim, dtype=jnp.float32 if narrow else x.dtype).astype(x.dtype)
