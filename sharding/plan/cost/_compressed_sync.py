"""Compressed gradient synchronization in closed form: what it sends, moves and holds."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from sharding import sync as methods
from sharding.plan.machine._collective_time import Operation
from sharding.sync import GradientSync

_WIDE = 4  # bytes: gradients are compressed in 32 bits
_BLOCK = 512  # elements that share a scale, as ``qsgd`` has them
_LEAST = 4096  # elements of an array that ``qsgd`` quantizes
_COMPRESSION = 2.0  # at least, of what ``powersgd`` compresses
# Bytes of device memory for each element. PowerSGD reads the gradient and the residual, writes
# their sum, reads it for P, for Q and for the new residual, writes that, and writes the mean; QSGD
# reads the gradient and the noise, writes codes, reads those of all devices, and writes the mean.
_MOVED = {"powersgd": 2 + 4 + 4 + 3 * 4 + 4 + 4, "qsgd": 2 + 4 + 1 + 1 + 4}


class SyncedArray(NamedTuple):
    """A gradient as its synchronization gets it."""

    shape: tuple[int, ...]  # of one device's part
    nbytes: float  # of it
    scattered: bool  # whether each device needs its shard of the mean only


class SyncWork(NamedTuple):
    """A synchronization of all gradients, on one device, once in a step."""

    sums: tuple[tuple[Operation, float], ...]  # collectives, and bytes of their arrays
    moved: float  # bytes of device memory that it reads and writes
    held: float  # bytes of temporaries
    flops: float  # operations of matrix products

    def sent(self, devices: int) -> float:
        """Bytes that one of the devices sends, in the ring convention."""
        rounds = sum(nbytes * (2 if op == "all-reduce" else 1) for op, nbytes in self.sums)
        return rounds * (devices - 1) / devices


def sync_of(name: str) -> GradientSync:
    """The synchronization of a name: ``"powersgd(RANK)"``, ``"qsgd(8)"`` or ``"qsgd(4)"``."""
    kind, number = _kind_and_number(name)
    return methods.powersgd(number) if kind == "powersgd" else methods.qsgd(number)


def sync_work(name: str, arrays: Sequence[SyncedArray], devices: int) -> SyncWork:
    """What a synchronization of these gradients takes.

    PowerSGD of rank r sums r (rows + columns) numbers of each matrix, if that is less than half of
    it; QSGD exchanges codes and a scale for each block, and gathers those of the mean where all
    devices need it. Other gradients are summed. Leading dims are stacks of matrices.
    """
    kind, number = _kind_and_number(name)
    sums: list[tuple[Operation, float]] = []
    compressed: list[int] = []
    for shape, nbytes, scattered in arrays:
        size = math.prod(shape)
        rows, columns = shape[-2:] if len(shape) > 1 else (1, 1)
        if kind == "powersgd" and _COMPRESSION * number * (rows + columns) < rows * columns:
            count = size // (rows * columns) * number * _WIDE
            sums += [("all-reduce", float(count * side)) for side in (rows, columns)]
            compressed.append(size)
        elif kind == "qsgd" and size >= _LEAST:
            blocks = devices * math.ceil(math.ceil(size / devices) / _BLOCK)
            codes = blocks * (_BLOCK * number / 8 + _WIDE)
            sums.append(("all-to-all", codes))
            if not scattered:
                sums.append(("all-gather", codes))
            compressed.append(size)
        else:
            sums.append(("reduce-scatter" if scattered else "all-reduce", nbytes))
    largest = _WIDE * max(compressed, default=0)
    return SyncWork(
        sums=tuple(sums),
        moved=float(_MOVED[kind] * sum(compressed)),
        # The mean of all, and one array at a time; or the latter twice.
        held=float(largest + (_WIDE * sum(compressed) if kind == "powersgd" else largest)),
        # With both factors, of the mean, and of the residual.
        flops=8.0 * number * sum(compressed) if kind == "powersgd" else 0.0,
    )


def _kind_and_number(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(powersgd|qsgd)\(([1-9]\d*)\)", name)
    if not match or (match[1] == "qsgd" and match[2] not in ("4", "8")):
        raise ValueError(
            f"gradients can be synchronized by 'powersgd(RANK)', 'qsgd(8)' or 'qsgd(4)', got "
            f"{name!r}."
        )
    return match[1], int(match[2])
