"""Wire bytes of sparse sync methods in closed form, and the method that sends least."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sharding.sync._agsparse import agsparse
from sharding.sync._dense import dense
from sharding.sync._interface import GradientSync
from sharding.sync._zen import zen

_BLOCK_SIZE = 256  # elements of OmniReduce's blocks
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
    #: number of devices -> the fraction of rows that are nonzero in the sum over so many, for 1, 2,
    #: 4, ... and all devices, averaged over groups
    densities: dict[int, float]
    #: of the rows in as many contiguous ranges as there are devices, the fullest range over the
    #: mean: for one device, and for the sum
    skewness: tuple[float, float]
    #: as ``densities``, for one device and for the sum, of blocks of 256 elements
    block_densities: tuple[float, float]

    @property
    def num_devices(self) -> int:
        """The number of measured devices."""
        return max(self.densities)

    @classmethod
    def measure(cls, ids: Sequence[Any], rows: int, width: int) -> "Sparsity":
        """Measures an array of ``rows`` of ``width`` elements by the nonzero rows of each device.

        ``ids`` has for each device its nonzero rows, such as its tokens; they may repeat.

        Raises:
          ValueError: if there are no devices, or an id is not a row of the array.
        """
        sets = [np.unique(np.asarray(x).ravel()) for x in ids]
        num = len(sets)
        if not num:
            raise ValueError("ids must hold the rows of at least one device, got none.")
        for x in sets:
            if x.size and not 0 <= x[0] <= x[-1] < rows:
                raise ValueError(f"ids must be from 0 to {rows - 1}, got {x[0]} to {x[-1]}.")
        union = np.unique(np.concatenate(sets))

        # Fractions of rows in the sums over 1, 2, 4, ... and all devices.
        sizes = [2**i for i in range(num.bit_length()) if 2**i < num] + [num]
        densities = {}
        for size in sizes:
            groups = [sets[i : i + size] for i in range(0, num - size + 1, size)]
            counts = [np.unique(np.concatenate(group)).size for group in groups]
            densities[size] = float(np.mean(counts)) / rows

        # The same fractions of OmniReduce's blocks, which hold several rows.
        rows_per_block = max(1, _BLOCK_SIZE // width)
        block_counts = [np.unique(x // rows_per_block).size for x in (*sets, union)]
        num_blocks = -(-rows // rows_per_block)
        blocks = float(np.mean(block_counts[:-1])) / num_blocks, block_counts[-1] / num_blocks
        of_one = float(np.mean([_skewness(x, rows, num) for x in sets]))
        skewness = of_one, _skewness(union, rows, num)
        return cls(rows, width, densities, skewness, blocks)

    def bytes_sent(self, itemsize: int = 4) -> dict[str, float]:
        r"""The bytes that one device sends for the full mean, by scheme (sources: see ``zen``).

        With n devices, :math:`d` and :math:`d_k` the densities of one device and of the sum of k, V
        rows of D numbers of b bytes, :math:`s` and :math:`s_n` the skewness of one device and of
        the sum, :math:`\beta` and :math:`\beta_n` the densities of blocks:

        ========== ========================================================================
        dense      :math:`2 (n - 1) / n \, V D b`
        agsparse   :math:`(n - 1) \, d V (D b + 4)`
        sparcml    :math:`\sum_{i < \log_2 n} d_{2^i} V (D b + 4)`
        omnireduce :math:`(n - 1) / n \, (s \beta + s_n \beta_n) V D b`
        zen        :math:`(n - 1) / n \, (d V (D b + 4) + d_n V D b + V / 8)`
        ========== ========================================================================
        """
        num, full = self.num_devices, self.rows * self.width * itemsize
        indexed = self.rows * (self.width * itemsize + 4)
        share = (num - 1) / num
        one, union = self.densities[1], self.densities[num]
        rounds = [self.densities[2**i] for i in range(math.ceil(math.log2(num)))]
        blocks = sum(s * d for s, d in zip(self.skewness, self.block_densities, strict=True))
        return {
            "dense": 2 * share * full,
            "agsparse": (num - 1) * one * indexed,
            "sparcml": sum(rounds) * indexed,
            "omnireduce": share * blocks * full,
            "zen": share * (one * indexed + union * full + self.rows / 8),
        }

    def choose(self, itemsize: int = 4) -> Choice:
        """The method that sends least of elements of ``itemsize`` bytes: dense, agsparse or zen."""
        one, union = (max(self.densities[num], 1 / self.rows) for num in (1, self.num_devices))
        syncs = {"dense": dense(), "agsparse": agsparse(one), "zen": zen(one, union_density=union)}
        costs = {name: cost for name, cost in self.bytes_sent(itemsize).items() if name in syncs}
        name = min(costs, key=costs.__getitem__)
        note = f"{name} sends least: {', '.join(f'{k} {v:,.0f} bytes' for k, v in costs.items())}."
        ties = [k for k, cost in costs.items() if k != name and cost < _TIE * costs[name]]
        if ties:
            note += f" {' and '.join(ties)} would send less than 10 % more: measure the time."
        return Choice(name, syncs[name], note)


def _skewness(rows: np.ndarray, total: int, num_ranges: int) -> float:
    """The fullest of several contiguous ranges of rows over the mean."""
    if not rows.size:
        return 1.0
    counts = np.bincount(rows // -(-total // num_ranges), minlength=num_ranges)
    return float(counts.max() * num_ranges / rows.size)
