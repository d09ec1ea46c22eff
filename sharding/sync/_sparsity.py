"""Wire bytes of sparse sync methods in closed form, and the method that sends least."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sharding.sync._agsparse import agsparse
from sharding.sync._dense import dense
from sharding.sync._interface import GradientSync
from sharding.sync._zen import zen

_TIE = 1.1  # methods that send less than so many times the least are reported as ties


class Choice(NamedTuple):
    """The gradient sync of this package that sends least."""

    name: str  # ``"dense"``, ``"agsparse"`` or ``"zen"``
    sync: GradientSync  # with the measured densities
    note: str  # what each method sends, and which ones send nearly as little


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """How sparse the gradients of one array are on all devices.

    Example:
      >>> import numpy as np
      >>> from sharding.sync import Sparsity
      >>> rng = np.random.default_rng(0)
      >>> tokens = [np.minimum(rng.zipf(1.2, 4096), 2**20) - 1 for _ in range(16)]
      >>> Sparsity.measure(tokens, rows=2**20, width=256).choose().name
      'zen'
    """

    rows: int  #: of the array
    width: int  #: elements of a row
    num_devices: int  #: those that were measured
    density: float  #: the fraction of rows that are nonzero on one device, on average
    union_density: float  #: the same of the sum over all devices

    @classmethod
    def measure(cls, ids: Sequence[Any], rows: int, width: int) -> "Sparsity":
        """Measures an array of ``rows`` of ``width`` elements by the nonzero rows of each device.

        ``ids`` has for each device its nonzero rows, such as its tokens; they may repeat.

        Raises:
          ValueError: if there are no devices, or an id is not a row of the array.
        """
        sets = [np.unique(np.asarray(x).ravel()) for x in ids]
        if not sets:
            raise ValueError("ids must hold the rows of at least one device, got none.")
        for x in sets:
            if x.size and not 0 <= x[0] <= x[-1] < rows:
                raise ValueError(f"ids must be from 0 to {rows - 1}, got {x[0]} to {x[-1]}.")
        density = float(np.mean([x.size for x in sets])) / rows
        union = np.unique(np.concatenate(sets)).size / rows
        return cls(rows, width, len(sets), density, union)

    def bytes_sent(self, itemsize: int = 4) -> dict[str, float]:
        r"""The bytes that one device sends for the full mean, by method.

        With n devices, :math:`d` and :math:`d_n` the densities of one device and of the sum of all,
        and V rows of D numbers of b bytes:

        ========== ========================================================================
        dense      :math:`2 (n - 1) / n \, V D b`
        agsparse   :math:`(n - 1) \, d V (D b + 4)`
        zen        :math:`(n - 1) / n \, (d V (D b + 4) + d_n V D b + V / 8)`
        ========== ========================================================================
        """
        full = self.rows * self.width * itemsize
        indexed = self.density * (full + 4 * self.rows)
        share = (self.num_devices - 1) / self.num_devices
        return {
            "dense": 2 * share * full,
            "agsparse": (self.num_devices - 1) * indexed,
            "zen": share * (indexed + self.union_density * full + self.rows / 8),
        }

    def choose(self, itemsize: int = 4) -> Choice:
        """The method that sends least of elements of ``itemsize`` bytes: dense, agsparse or zen."""
        one, union = (max(x, 1 / self.rows) for x in (self.density, self.union_density))
        syncs = {"dense": dense(), "agsparse": agsparse(one), "zen": zen(one, union_density=union)}
        costs = self.bytes_sent(itemsize)
        name = min(costs, key=costs.__getitem__)
        note = f"{name} sends least: {', '.join(f'{k} {v:,.0f} bytes' for k, v in costs.items())}."
        ties = [k for k, cost in costs.items() if k != name and cost < _TIE * costs[name]]
        if ties:
            note += f" {' and '.join(ties)} would send less than 10 % more: measure the time."
        return Choice(name, syncs[name], note)
