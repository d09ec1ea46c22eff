"""Which device owns each row of a sparse gradient: ranges of rows, or of their hash."""

import jax
import jax.numpy as jnp

from sharding.collectives._row_hash import RowHash


class RowOwners:
    """Which device owns each row of an array, and in which slot of its memory.

    The permutation maps rows to slots, counted over all owners; without one each owner has
    contiguous rows. Each owner has ``num_slots``; the last ones of the last owners may be empty.
    """

    def __init__(self, num_rows: int, num_owners: int, permutation: RowHash | None = None):
        self.num_rows, self.num_owners = num_rows, num_owners
        self.num_slots = -(-num_rows // num_owners)
        self._permutation = permutation

    def row_of_slots(self) -> jax.Array:
        """The row in every slot, owner after owner; ``num_rows`` in empty slots."""
        slot = jnp.arange(self.num_owners * self.num_slots, dtype=jnp.int32)
        if self._permutation is None:
            return jnp.minimum(slot, self.num_rows)
        row = self._permutation.invert(jnp.minimum(slot, self.num_rows - 1))
        return jnp.where(slot < self.num_rows, row, self.num_rows)

    def slot_of(self, rows: jax.Array) -> jax.Array:
        """The slot of each row, counted over all owners."""
        return rows if self._permutation is None else self._permutation.apply(rows)
