"""Gradients most of whose rows are zero: only the others are sent, and nothing is lost."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.sync._dense import dense_method
from sharding.sync._interface import Axes, GradientSync, Method, Noise, leafwise, own_piece, wide
from sharding.sync._mixer import Mixer

_ROUNDS = (1, 2, 4)


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

    and three standard deviations of what a hash leaves to chance.

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
      ValueError: if a density is not above 0 and at most 1, or the granularity is unknown.

    Example:
      >>> from sharding import sync
      >>> exchange = sync.by_path({"embedding": sync.zen(density=0.01)})

    References:
      Wang, Xu, Xi, Wang, Shrivastava, Ng: ZEN: Empowering Distributed Training with
      Sparsity-driven Data Synchronization, OSDI 2025, arXiv 2309.13254.
    """
    for name, value in (("density", density), ("union_density", union_density)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}.")
    if granularity not in ("row", "element"):
        raise ValueError(f"granularity must be 'row' or 'element', got {granularity!r}.")
    plain = dense_method()

    def rows_of(x: jax.Array) -> jax.Array:
        return wide(x).reshape(x.shape[0] if granularity == "row" else x.size, -1)

    def mean(x: jax.Array, state: Any, axes: Axes, noise: Noise) -> tuple[jax.Array, Any]:
        num, rows = lax.axis_size(axes), rows_of(x)
        owners = Owners(rows.shape[0], num, Mixer(rows.shape[0], seed))
        union = min(1.0, num * density) if union_density is None else union_density
        push = [_room(density, owners.places)]
        pull = _room(union, owners.places)

        def sparse(rounds: int) -> Callable[[jax.Array], jax.Array]:
            def run(rows: jax.Array) -> jax.Array:
                total, touched = _push(_entries(rows, owners), owners, push[0], rounds, axes)
                return _pull(total, touched, owners, pull, axes) / num

            return run

        def whole(rows: jax.Array) -> jax.Array:
            return plain.mean(rows, (), axes, noise)[0]

        counts = _counts(rows, owners)
        return _choose(counts, push[0], owners, axes, sparse, whole, rows).reshape(x.shape), state

    def piece(
        x: jax.Array, state: Any, axes: Axes, noise: Noise, dim: int
    ) -> tuple[jax.Array, Any]:
        num = lax.axis_size(axes)
        if granularity == "element":
            total, state = mean(x, state, axes, noise)
            return own_piece(total, axes, dim), state
        by_rows = dim % x.ndim == 0
        rows = rows_of(x) if by_rows else jnp.moveaxis(wide(x), dim, 1)
        owners = Owners(x.shape[0], num if by_rows else 1)
        room = _room(density, owners.places)

        def sparse(rounds: int) -> Callable[[jax.Array], jax.Array]:
            def run(rows: jax.Array) -> jax.Array:
                if by_rows:
                    return _push(_entries(rows, owners), owners, room, rounds, axes)[0] / num
                return _push_parts(rows, owners, room, rounds, axes) / num

            return run

        def whole(rows: jax.Array) -> jax.Array:
            if by_rows:
                return plain.piece(rows, (), axes, noise, -2)[0]  # type: ignore[misc]
            return plain.piece(rows, (), axes, noise, 1 - rows.ndim)[0]  # type: ignore[misc]

        out = _choose(_counts(rows, owners), room, owners, axes, sparse, whole, rows)
        if by_rows:
            return out.reshape(-1, *x.shape[1:]), state
        return jnp.moveaxis(out, 1, dim), state

    method = Method(lambda x: (), mean, piece, is_linear=True)

    def choose(path: str, x: Any) -> Method:
        has_rows = granularity == "element" or len(x.shape) > 1
        return method if has_rows and math.prod(x.shape) >= min_size else plain

    return leafwise(choose)


class Owners:
    """Which device owns which row, and in which place of its memory.

    Args:
      rows: how many there are.
      num: how many devices.
      mixer: the permutation of rows that is cut into contiguous parts; None cuts them as they lie.

    Attributes:
      places: of an owner's memory.
    """

    def __init__(self, rows: int, num: int, mixer: Mixer | None = None):
        self.rows, self.num, self._mixer = rows, num, mixer
        self.places = -(-rows // num)

    def row_at(self) -> jax.Array:
        """The row in each place, owner after owner; ``rows`` where there is none."""
        at = jnp.arange(self.num * self.places, dtype=jnp.int32)
        if self._mixer is None:
            return jnp.minimum(at, self.rows)
        row = self._mixer.unmix(jnp.minimum(at, self.rows - 1))
        return jnp.where(at < self.rows, row, self.rows)

    def place_of(self, rows: jax.Array) -> jax.Array:
        """The place of each row, counted through all owners."""
        return rows if self._mixer is None else self._mixer.mix(rows)


class Entries(NamedTuple):
    """What a device has to send; lists have an entry for each.

    Attributes:
      owner: to which device; sorted.
      rank: how many before it go to the same device; of what is not sent -1.
      place: in that device's memory.
      values: ``values(indices)``, the rows of these entries, zeros where an index is too large.
    """

    owner: jax.Array
    rank: jax.Array
    place: jax.Array
    values: Callable[[jax.Array], jax.Array]


def _room(density: float, places: int) -> int:
    """Of so many places what part is expected to be taken, and three standard deviations."""
    expected = density * places
    return min(places, math.ceil(expected + 3 * math.sqrt(expected * (1 - density))) or 1)


def _is_set(rows: jax.Array, owners: Owners) -> jax.Array:
    """(owners, places): whether a row is there that is not zero."""
    found = jnp.any(rows != 0, axis=tuple(range(1, rows.ndim)))
    return jnp.take(found, owners.row_at(), fill_value=False).reshape(owners.num, owners.places)


def _counts(rows: jax.Array, owners: Owners) -> jax.Array:
    """How many rows go to each owner."""
    return jnp.sum(_is_set(rows, owners), 1, dtype=jnp.int32)


def _entries(rows: jax.Array, owners: Owners) -> Entries:
    """A dense gradient's, one for each place of each owner."""
    found = _is_set(rows, owners)
    rank = jnp.where(found, jnp.cumsum(found, 1, dtype=jnp.int32) - 1, -1).ravel()
    at = jnp.arange(rank.size, dtype=jnp.int32)

    def values(indices: jax.Array) -> jax.Array:
        row = jnp.take(owners.row_at(), indices, fill_value=owners.rows)
        return jnp.take(rows, row, axis=0, fill_value=0)

    return Entries(at // owners.places, rank, at % owners.places, values)


def _choose(
    counts: jax.Array,
    room: int,
    owners: Owners,
    axes: Axes,
    sparse: Callable[[int], Callable[[jax.Array], jax.Array]],
    whole: Callable[[jax.Array], jax.Array],
    rows: jax.Array,
) -> jax.Array:
    """The fewest rounds in which all is sent; everything where that is not more."""
    width = rows.size // rows.shape[0]
    worth = [r for r in _ROUNDS if r * room * (width + 1) < owners.places * width]
    if not worth:
        return whole(rows)
    needed = lax.pmax(-(-jnp.max(counts) // room), axes)
    choice = jnp.searchsorted(jnp.array(worth), needed)
    return lax.switch(choice, [*map(sparse, worth), whole], rows)


def _push(
    entries: Entries, owners: Owners, room: int, rounds: int, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """What all devices have for the places of this one: the sums, and which places were meant."""
    num, places = owners.num, owners.places
    kind = jax.eval_shape(entries.values, jax.ShapeDtypeStruct((1,), jnp.int32))

    def one(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, touched = carry
        picked = _pick(entries, num, room, i)
        place = jnp.take(entries.place, picked, fill_value=places)
        values = entries.values(picked)
        place, values = (
            lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
            for x in (place, values)
        )
        return (
            total.at[place].add(values, mode="drop"),
            touched.at[place].set(True, mode="drop"),
        )

    start = jnp.zeros((places, *kind.shape[1:]), kind.dtype), jnp.zeros(places, bool)
    return lax.fori_loop(0, rounds, one, start) if rounds > 1 else one(0, start)


def _push_parts(rows: jax.Array, owners: Owners, room: int, rounds: int, axes: Axes) -> jax.Array:
    """The sum of all rows, of each this device's part of the second dim."""
    num, entries = lax.axis_size(axes), _entries(rows, owners)
    shape = (rows.shape[0], rows.shape[1] // num, *rows.shape[2:])

    def one(i: Any, total: jax.Array) -> jax.Array:
        picked = _pick(entries, 1, room, i)
        place = jnp.take(entries.place, picked, fill_value=owners.rows)
        values = entries.values(picked).reshape(room, num, *shape[1:])
        place = lax.all_gather(place, axes, tiled=True)
        values = lax.all_to_all(values, axes, split_axis=1, concat_axis=0, tiled=True)
        return total.at[place].add(values.reshape(-1, *shape[1:]), mode="drop")

    start = jnp.zeros(shape, rows.dtype)
    return lax.fori_loop(0, rounds, one, start) if rounds > 1 else one(0, start)


def _pick(entries: Entries, num: int, room: int, i: Any) -> jax.Array:
    """Indices of the entries of a round, ``room`` for each owner; too large where there is none."""
    size = entries.rank.size
    taken = (entries.rank >= 0) & (entries.rank // room == i)
    at = jnp.where(taken, entries.owner * room + entries.rank % room, num * room)
    empty = jnp.full(num * room, size, jnp.int32)
    return empty.at[at].set(jnp.arange(size, dtype=jnp.int32), mode="drop")


def _pull(total: jax.Array, touched: jax.Array, owners: Owners, room: int, axes: Axes) -> jax.Array:
    """All rows of the sum, of what each owner has of it."""
    places, num = owners.places, owners.num
    place_of = owners.place_of(jnp.arange(owners.rows, dtype=jnp.int32))

    def sparse(total: jax.Array, touched: jax.Array) -> jax.Array:
        rank = jnp.cumsum(touched, dtype=jnp.int32) - 1
        at = jnp.full(room, places, jnp.int32)
        here = jnp.arange(places, dtype=jnp.int32)
        at = at.at[jnp.where(touched, rank, room)].set(here, mode="drop")
        values = lax.all_gather(jnp.take(total, at, axis=0, fill_value=0), axes, tiled=True)
        bits = jnp.packbits(touched)
        bits = lax.all_gather(bits, axes, tiled=True).reshape(num, -1)
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
    return lax.all_gather(total, axes, tiled=True)
