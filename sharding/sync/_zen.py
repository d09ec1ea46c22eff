"""Gradients most of whose rows are zero: only the others are sent, and nothing is lost."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._all_gather import all_gather_concat
from sharding.collectives._permutation import Permutation
from sharding.collectives._reduce_scatter import own_shard
from sharding.collectives._sparse_rows import (
    RowOwners,
    SendList,
    SparseRows,
    along_dim,
    candidates_of_round,
    for_rounds,
    in_rounds,
    list_capacity,
    rows_of_array,
    rows_of_lookups,
)
from sharding.placement._specs import Axes
from sharding.sync._dense import dense_mean, dense_method, dense_piece
from sharding.sync._interface import (
    GradientSync,
    Method,
    Noise,
    RowMethod,
    check_density,
    leafwise,
)

# Elements that int32 can number, with room for owners whose last places are empty.
_MOST_ELEMENTS = 2**31 - 2**20


def zen(
    density: float = 0.01,
    *,
    union_density: float | None = None,
    granularity: str = "row",
    min_size: int = 4096,
    seed: int = 0,
) -> GradientSync:
    r"""Sends the rows that are not zero, each to a device that owns it, and what came of it back.

    The scheme of ZEN: a hash that all devices share scatters rows over owners, so that each gets
    about as many (*push*); owners add, and send all others their rows and a bit for each of those
    that are zero (*pull*). The hash is a permutation: owner and place in its memory are arithmetic,
    no two rows meet, and no index stands for "empty". How much is sent is fixed when a program is
    compiled, from the density that is expected. Devices that have more rows for an owner than that
    go on for 2 or 4 rounds; beyond, or where fewer would not be less, the whole gradient is sent.
    All devices decide alike, from the largest count.

    A device that keeps a piece (ZeRO) needs no pull: where rows are cut it owns those of its piece,
    as they lie; where another dim is cut, it is sent its part of every row.

    On the wire (n - 1) / n of, with d the density and d_n that of the sum, V rows of D numbers,

    .. math::

      \underbrace{d V (4 D + 4)}_{\text{push}} +
      \underbrace{d_n V \, 4 D + V / 8}_{\text{pull}} \text{ bytes},

    and room for what a hash leaves to chance: :math:`\sqrt{2 \ln 100 n^2}` standard deviations of
    what a device has for an owner. One time in 100 the fullest of all these lists is longer.

    Args:
      density: what part of its rows are not zero on one device: for an embedding the distinct
        tokens of a batch over all tokens.
      union_density: the same of the sum over devices; None for that of one device times their
        number, at most 1: the sum if no row is on two devices.
      granularity: ``"row"``: along the first dim. ``"element"``: each number by itself, as after a
        top-k.
      min_size: smaller arrays are sent whole; so are, of rows, arrays of one dim.
      seed: of the hash.

    Returns:
      A ``GradientSync`` without state. The mean equals that of ``dense`` up to the order of sums;
      what is not finite stays in its row.

    Raises:
      ValueError: if a density is not above 0 and at most 1, or the granularity is unknown; in
        ``init``: if single elements are to be numbered in an array of 2^31 or more.

    Example:
      >>> from sharding import sync
      >>> exchange = sync.by_path({"embedding": sync.zen(density=0.01)})

    References:
      Wang, Xu, Xi, Wang, Shrivastava, Ng: ZEN: Empowering Distributed Training with
      Sparsity-driven Data Synchronization, OSDI 2025, arXiv 2309.13254.
    """
    check_density(density)
    if union_density is not None:
        check_density(union_density, "union_density")
    if granularity not in ("row", "element"):
        raise ValueError(f"granularity must be 'row' or 'element', got {granularity!r}.")
    plain = dense_method()

    def mean_of(rows: SparseRows, axes: Axes) -> jax.Array:
        num = lax.axis_size(axes)
        owners = RowOwners(rows.shape[0], num, Permutation(rows.shape[0], seed))
        one = min(density, rows.max_rows / rows.shape[0])
        union = min(1.0, num * one if union_density is None else union_density)
        room = list_capacity(one, owners.num_slots, num**2)
        back = list_capacity(union, owners.num_slots, num)
        limit = min(rows.max_rows, owners.num_slots)

        def send(send_list: SendList, rounds: int) -> jax.Array:
            total, touched = _push(send_list, owners, room, rounds, axes)
            return _pull((total / num).astype(rows.dtype), touched, owners, back, axes)

        def whole() -> jax.Array:
            return dense_mean(rows.dense(), axes).astype(rows.dtype)

        width = math.prod(rows.shape[1:])
        most = owners.num_slots * width / (width + 1)
        return in_rounds(lambda: rows.send_list(owners), limit, room, axes, send, whole, most)

    def piece_of(rows: SparseRows, axes: Axes, dim: int) -> jax.Array:
        """Along dim 0 or 1."""
        num = lax.axis_size(axes)
        owners = RowOwners(rows.shape[0], 1 if dim else num)
        one = min(density, rows.max_rows / rows.shape[0])
        room = list_capacity(one, owners.num_slots, num * owners.num_owners)
        limit = min(rows.max_rows, owners.num_slots)

        def send(send_list: SendList, rounds: int) -> jax.Array:
            if dim:
                return _push_parts(send_list, rows.shape, room, rounds, axes) / num
            return _push(send_list, owners, room, rounds, axes)[0] / num

        def whole() -> jax.Array:
            return dense_piece(rows.dense(), axes, dim)

        # An index goes to the owner of the row, or to all devices.
        width = math.prod(rows.shape[1:])
        most = owners.num_slots * width / (width + (num if dim else 1))
        return in_rounds(lambda: rows.send_list(owners), limit, room, axes, send, whole, most)

    def mean(x: jax.Array, state: Any, axes: Axes, noise: Noise) -> tuple[jax.Array, Any]:
        rows = x.reshape(x.shape[0] if granularity == "row" else x.size, -1)
        return mean_of(rows_of_array(rows), axes).reshape(x.shape), state

    def piece(
        x: jax.Array, state: Any, axes: Axes, noise: Noise, dim: int
    ) -> tuple[jax.Array, Any]:
        if granularity == "element":
            total, state = mean(x, state, axes, noise)
            return own_shard(total, axes, dim), state
        return along_dim(x, dim, lambda x, dim: piece_of(rows_of_array(x), axes, dim)), state

    def reduce_rows(
        ids: jax.Array, rows: jax.Array, num_rows: int, axes: Axes, dim: int
    ) -> jax.Array:
        if not dim:
            return mean_of(rows_of_lookups(ids, num_rows, rows), axes)
        return along_dim(
            rows, dim, lambda x, dim: piece_of(rows_of_lookups(ids, num_rows, x), axes, dim)
        )

    of_rows = RowMethod(reduce_rows, density) if granularity == "row" else None
    method = Method(lambda x: (), mean, piece, is_linear=True, rows=of_rows)

    def choose(path: str, x: Any) -> Method:
        if granularity == "element" and math.prod(x.shape) > _MOST_ELEMENTS:
            raise ValueError(
                f"zen numbers single elements in int32, up to {_MOST_ELEMENTS:,}; {path!r} of "
                f"shape {tuple(x.shape)} has {math.prod(x.shape):,}. Use granularity='row' for it "
                "(sync.by_path), or make one parameter of each layer."
            )
        has_rows = granularity == "element" or len(x.shape) > 1
        return method if has_rows and math.prod(x.shape) >= min_size else plain

    return leafwise(choose)


def _push(
    send_list: SendList, owners: RowOwners, room: int, rounds: int, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """What all devices have for the places of this one: the sums, and which places were meant."""
    num, places = owners.num_owners, owners.num_slots
    kind = jax.eval_shape(send_list.values, jax.ShapeDtypeStruct((1,), jnp.int32))

    def one(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, touched = carry
        picked = candidates_of_round(send_list, num, room, i)
        place = jnp.take(send_list.slot, picked, fill_value=places)
        place, values = (
            lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
            for x in (place, send_list.values(picked))
        )
        total = total.at[place].add(values.astype(total.dtype), mode="drop")
        return total, touched.at[place].set(True, mode="drop")

    dtype = jnp.promote_types(kind.dtype, jnp.float32)
    start = jnp.zeros((places, *kind.shape[1:]), dtype), jnp.zeros(places, bool)
    return for_rounds(rounds, one, start)


def _push_parts(
    send_list: SendList, shape: tuple[int, ...], room: int, rounds: int, axes: Axes
) -> jax.Array:
    """The sum of all rows, of each this device's part of the second dim."""
    num = lax.axis_size(axes)
    part = (shape[1] // num, *shape[2:])

    def one(i: Any, total: jax.Array) -> jax.Array:
        picked = candidates_of_round(send_list, 1, room, i)
        place = jnp.take(send_list.slot, picked, fill_value=shape[0])
        values = send_list.values(picked).reshape(room, num, *part)
        place = all_gather_concat(place, axes)
        values = lax.all_to_all(values, axes, split_axis=1, concat_axis=0, tiled=True)
        values = values.reshape(-1, *part).astype(total.dtype)
        return total.at[place].add(values, mode="drop")

    kind = jax.eval_shape(send_list.values, jax.ShapeDtypeStruct((1,), jnp.int32))
    dtype = jnp.promote_types(kind.dtype, jnp.float32)
    return for_rounds(rounds, one, jnp.zeros((shape[0], *part), dtype))


def _pull(
    total: jax.Array, touched: jax.Array, owners: RowOwners, room: int, axes: Axes
) -> jax.Array:
    """All rows of the sum, of what each owner has of it."""
    places, num = owners.num_slots, owners.num_owners
    place_of = owners.slot_of(jnp.arange(owners.num_rows, dtype=jnp.int32))

    def sparse(total: jax.Array, touched: jax.Array) -> jax.Array:
        rank = jnp.cumsum(touched, dtype=jnp.int32) - 1
        at = jnp.full(room, places, jnp.int32)
        here = jnp.arange(places, dtype=jnp.int32)
        at = at.at[jnp.where(touched, rank, room)].set(here, mode="drop")
        values = all_gather_concat(jnp.take(total, at, axis=0, fill_value=0), axes)
        bits = jnp.packbits(touched)
        bits = all_gather_concat(bits, axes).reshape(num, -1)
        touched = jnp.unpackbits(bits, axis=1, count=places).astype(bool)
        rank = jnp.cumsum(touched, 1, dtype=jnp.int32) - 1
        first = jnp.arange(num, dtype=jnp.int32)[:, None]
        found = jnp.where(touched, rank + room * first, num * room).ravel()
        return jnp.take(values, jnp.take(found, place_of), axis=0, fill_value=0)

    def whole(total: jax.Array, touched: jax.Array) -> jax.Array:
        del touched
        return jnp.take(_gather_whole(total, axes), place_of, axis=0)

    width = total.size // places
    if room * width * 32 + places >= places * width * 32:
        return whole(total, touched)
    most = lax.pmax(jnp.sum(touched, dtype=jnp.int32), axes)
    return lax.cond(most <= room, sparse, whole, total, touched)


def _gather_whole(total: jax.Array, axes: Axes) -> jax.Array:
    return all_gather_concat(total, axes)
