"""What sparse exchanges send, in closed form, and which of them sends least."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sharding.sync._agsparse import agsparse
from sharding.sync._dense import dense
from sharding.sync._interface import GradientSync
from sharding.sync._zen import zen

_BLOCK = 256  # elements of OmniReduce's blocks
_TIE = 1.1


class Choice(NamedTuple):
    """Of the exchanges that are here, the one that sends least.

    Attributes:
      name: ``"dense"``, ``"agsparse"`` or ``"zen"``.
      sync: the exchange, made for what was measured.
      note: what it sends, what the others would, and where the choice hardly matters.
    """

    name: str
    sync: GradientSync
    note: str


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """How sparse the gradients of one array are on all devices.

    Attributes:
      rows: of the array.
      width: elements of a row.
      densities: of the sums over the first 1, 2, 4, ... devices and over all, averaged over groups
        of so many: what part of the rows is not zero. By the number of devices.
      overlap: of two devices, how many rows both have over those of the one that has fewer; the
        mean of neighbours.
      skewness: of as many contiguous parts of the rows as there are devices, what the fullest has
        over what all have on average: of one device, and of the sum.
      block_densities: as ``densities`` of one device and of the sum, of blocks of 256 elements.

    Example:
      >>> import numpy as np
      >>> from sharding.sync import Sparsity
      >>> rng = np.random.default_rng(0)
      >>> tokens = [np.minimum(rng.zipf(1.2, 4096), 2**20) - 1 for _ in range(16)]
      >>> found = Sparsity.measure(tokens, rows=2**20, width=256)
      >>> found.choose().name
      'zen'
    """

    rows: int
    width: int
    densities: dict[int, float]
    overlap: float
    skewness: tuple[float, float]
    block_densities: tuple[float, float]

    @property
    def num_devices(self) -> int:
        """How many were measured."""
        return max(self.densities)

    @classmethod
    def measure(cls, ids: Sequence[Any], rows: int, width: int) -> "Sparsity":
        """Of the rows that each device has.

        Args:
          ids: for each device the rows that are not zero, such as its tokens; any may come often.
          rows: of the array.
          width: elements of a row.

        Raises:
          ValueError: if there are no devices, or a row is not one of the array.
        """
        sets = [np.unique(np.asarray(x).ravel()) for x in ids]
        num = len(sets)
        if not num:
            raise ValueError("ids must have the rows of at least one device, got none.")
        if any(x.size and not 0 <= x[0] <= x[-1] < rows for x in sets):
            raise ValueError(f"rows must be from 0 to {rows - 1}.")
        sizes = [2**i for i in range(num.bit_length()) if 2**i < num] + [num]
        densities = {}
        for size in sizes:
            groups = [sets[i : i + size] for i in range(0, num - size + 1, size)]
            found = [np.unique(np.concatenate(group)).size for group in groups]
            densities[size] = float(np.mean(found)) / rows
        union = np.unique(np.concatenate(sets))
        pairs = [
            np.intersect1d(a, b, assume_unique=True).size / min(a.size, b.size)
            for a, b in itertools.pairwise(sets)
            if a.size and b.size
        ]
        one = float(np.mean([_skewness(x, rows, num) for x in sets]))
        block = max(1, _BLOCK // width)
        in_blocks = [np.unique(x // block).size for x in (*sets, union)]
        blocks = -(-rows // block)
        return cls(
            rows,
            width,
            densities,
            float(np.mean(pairs)) if pairs else 0.0,
            (one, _skewness(union, rows, num)),
            (float(np.mean(in_blocks[:-1])) / blocks, in_blocks[-1] / blocks),
        )

    def bytes_sent(self, itemsize: int = 4) -> dict[str, float]:
        r"""What one device sends for the whole mean, of each scheme.

        With n devices, d and :math:`d_k` the density of one and of the sum of k, V rows of D
        numbers of b bytes, s and :math:`s_n` the skewness, :math:`\beta` densities of blocks:

        ========== ========================================================================
        dense      :math:`2 (n - 1) / n \, V D b`
        agsparse   :math:`(n - 1) \, d V (D b + 4)`
        sparcml    :math:`\sum_{i < \log_2 n} d_{2^i} V (D b + 4)`
        omnireduce :math:`(n - 1) / n \, (s \beta + s_n \beta_n) V D b`
        zen        :math:`(n - 1) / n \, (d V (D b + 4) + d_n V D b + V / 8)`
        ========== ========================================================================

        References:
          Wang, Xu, Xi, Wang, Shrivastava, Ng: ZEN: Empowering Distributed Training with
          Sparsity-driven Data Synchronization, OSDI 2025, arXiv 2309.13254.
        """
        num, whole = self.num_devices, self.rows * self.width * itemsize
        indexed = self.rows * (self.width * itemsize + 4)
        share = (num - 1) / num
        one, union = self.densities[1], self.densities[num]
        rounds = [self.densities[2**i] for i in range(math.ceil(math.log2(num)))]
        in_blocks = sum(s * d for s, d in zip(self.skewness, self.block_densities, strict=True))
        return {
            "dense": 2 * share * whole,
            "agsparse": (num - 1) * one * indexed,
            "sparcml": sum(rounds) * indexed,
            "omnireduce": share * in_blocks * whole,
            "zen": share * (one * indexed + union * whole + self.rows / 8),
        }

    def choose(self, itemsize: int = 4) -> Choice:
        """Which exchange sends least: ``dense``, ``agsparse`` or ``zen``.

        Args:
          itemsize: bytes of an element.
        """
        one, union = (max(self.densities[num], 1 / self.rows) for num in (1, self.num_devices))
        made = {"dense": dense(), "agsparse": agsparse(one), "zen": zen(one, union_density=union)}
        costs = {name: cost for name, cost in self.bytes_sent(itemsize).items() if name in made}
        name = min(costs, key=costs.__getitem__)
        told = ", ".join(f"{each} {cost:,.0f} bytes" for each, cost in costs.items())
        ties = [each for each, cost in costs.items() if each != name and cost < _TIE * costs[name]]
        note = f"{name} sends least: {told}."
        if ties:
            note += f" {' and '.join(ties)} would send less than 10 % more: measure the time."
        return Choice(name, made[name], note)


def _skewness(rows: np.ndarray, total: int, parts: int) -> float:
    """What the fullest of contiguous parts has over the mean."""
    if not rows.size:
        return 1.0
    counts = np.bincount(rows // -(-total // parts), minlength=parts)
    return float(counts.max() * parts / rows.size)
