"""What compiled steps need, and the largest batch that fits, found by compiling several sizes."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax

from sharding.plan._format import Printed, Table, size
from sharding.plan.audit._audit import Audit, audit
from sharding.plan.machine._devices import HEADROOM, DeviceKind, kind_of

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LARGEST_STEP = 8  # the next size, in units of the largest that fits


@dataclasses.dataclass(frozen=True)
class Tried:
    batch: int  # the size
    memory: float  # bytes of a device; infinite where the compiler failed without a figure
    fits: bool  # whether ``memory`` is within the limit of the search


@dataclasses.dataclass(frozen=True)
class FoundBatch(Printed):
    """The result of ``find_batch``; ``str()`` is a table of all sizes that were tried."""

    batch: int  #: the largest size that fits; 0 where none does
    memory: float  #: of a device, in bytes
    headroom: float  #: the share of the memory that is left free
    tried: tuple[Tried, ...]  #: all sizes that were compiled, in order
    audit: Audit | None  #: the audit of the largest size that fits; None where none does
    complete: bool  #: False where the limit of the search fits, so that larger sizes may

    @property
    def usable(self) -> float:
        """Bytes of a device that a step may take."""
        return (1 - self.headroom) * self.memory

    def to_dict(self) -> dict[str, Any]:
        names = ("batch", "memory", "headroom", "usable", "complete")
        tried = [dataclasses.asdict(size) for size in self.tried]
        return {name: getattr(self, name) for name in names} | {"tried": tried}

    def tables(self) -> list[Table]:
        verdicts = {True: "fits", False: "too much"}
        rows = [(str(x.batch), needed(x.memory), verdicts[x.fits]) for x in self.tried]
        title = f"Batches in {size(self.usable)} of a device, {self.headroom:.0%} left free"
        return [Table(title, ("batch", "needs", ""), rows)]

    @property
    def sentences(self) -> list[str]:
        if not self.batch:
            return [f"no batch fits: {self.tried[0].batch} needs {needed(self.tried[0].memory)}"]
        more = "" if self.complete else "; larger ones were not tried"
        return [f"the largest batch that fits is {self.batch}{more}"]


def find_batch(
    make_step: Callable[[int], Any],
    *,
    device: DeviceKind | str | None = None,
    memory: float | None = None,
    headroom: float = HEADROOM,
    start: int = 1,
    limit: int = 1 << 16,
    unit: int = 1,
    report: Callable[[Tried], None] | None = None,
    **options: Any,
) -> FoundBatch:
    """The largest batch whose compiled step leaves ``headroom`` of a device's memory free.

    Steps are compiled and audited, not run, so that compile-only targets do.

    Args:
      make_step: returns the step of a batch, lowered or compiled, or its ``Audit``. A batch is that
        of all devices, as everywhere; ``start``, ``limit`` and ``unit`` count the same.
      device: the kind of device, or the name of a target, whose memory is the limit.
      memory: bytes of memory, instead of the device's.
      headroom: the share of the memory that is left free, from 0 to below 1.
      start: the smallest size, which is tried first.
      limit: the largest.
      unit: of which all sizes are multiples.
      report: is called with each ``Tried`` size.
      **options: of ``audit``.

    Raises:
      ValueError: nothing is known of the memory, or a number is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from sharding.plan import find_batch
      >>> def make_step(batch):
      ...     return jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((batch, 1024), "f4"))
      >>> find_batch(make_step, memory=2**20).batch  # of 8 KiB each, in 92 % of a MiB
      117
    """
    kind = kind_of(device) if isinstance(device, str) else device
    memory = memory or (kind.memory if kind else 0.0)
    if not memory > 0:
        raise ValueError(
            f"find_batch needs the memory of a device, and none is known of {device!r}; give "
            "memory= in bytes, or a target such as 'v5e:4x4'."
        )
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom must be from 0 to below 1, got {headroom}.")
    if not 1 <= start <= limit:
        raise ValueError(f"start must be from 1 to limit = {limit}, got {start}.")
    if start % unit:
        raise ValueError(f"start must be a multiple of unit = {unit}, got {start}.")
    tried = dict[int, Tried]()
    audits = dict[int, Audit | None]()
    usable = (1 - headroom) * memory

    def nbytes_of(batch: int) -> float:
        found, need = audit_or_bytes(lambda: make_step(batch), kind, **options)
        tried[batch] = Tried(batch, need, found is not None and need <= usable)
        audits[batch] = found
        if report is not None:
            report(tried[batch])
        too_much = math.nextafter(usable, math.inf)
        return need if found is not None else max(need, too_much)

    batch = largest(nbytes_of, usable, unit=unit, start=start, limit=limit)
    complete = not all(size.fits for size in tried.values())
    every = tuple(tried.values())
    return FoundBatch(batch, memory, headroom, every, audits.get(batch), complete)


def largest(
    nbytes_of: Callable[[int], float],
    usable: float,
    *,
    unit: int = 1,
    start: int | None = None,
    limit: int = 1 << 30,
    doubled: bool = False,
) -> int:
    """The largest size that takes at most ``usable`` bytes; 0 if that of ``start`` takes more.

    Sizes are multiples of ``unit``, the first one ``start``, else one unit; or, ``doubled``, that
    one times powers of two. Bytes must not shrink with a size. The next size is where the line
    through two known ones meets the limit, but at most 8 times the largest that fits; or the
    middle, where lines do not halve the interval.

    >>> largest(lambda size: 10.0 * size + 3, 1000.0), largest(float, 100.0, doubled=True)
    (99, 64)
    """
    limit -= limit % unit
    low, high = 0, limit + unit  # the largest that fits, the smallest that does not
    known = dict[int, float]()
    size = start or unit
    misses = 0
    while True:
        known[size] = nbytes_of(size)
        width = high - low
        before = low
        if known[size] <= usable:
            low = size
        else:
            high = size
        if not low or low + unit >= high or (doubled and size == high):
            return low
        # After two lines that neither halved the interval nor doubled ``low``, try the middle.
        good = 2 * (high - low) <= width or (high > limit and low >= 2 * before)
        misses = 0 if misses == 2 or good else misses + 1
        by_line = known if misses < 2 and not doubled else {}
        size = 2 * low if doubled else _next(low, high, limit, by_line, usable, unit)
        if size > limit:
            return low


def _next(
    low: int, high: int, limit: int, tried: dict[int, float], usable: float, unit: int
) -> int:
    """The size to try next, between one that fits and one that does not; by the sizes tried."""
    known = [size for size in tried if tried[size] < math.inf]
    if len(known) >= 2:
        # The line through the two sizes nearest to the limit.
        a, b = sorted(known, key=lambda size: abs(tried[size] - usable))[:2]
        slope = (tried[b] - tried[a]) / (b - a)
        if slope > 0:
            guess = int(a + (usable - tried[a]) / slope + 1e-6)
            if high > limit:  # none was too large yet: lines of small batches reach too far
                guess = min(guess, _LARGEST_STEP * low)
            return min(max(guess - guess % unit, low + unit), high - unit)
    if high > limit:
        return min(2 * low, limit)
    return (low + high) // (2 * unit) * unit


def audit_or_bytes(
    make_step: Callable[[], Any], kind: DeviceKind | None, **options: Any
) -> tuple[Audit | None, float]:
    """The audit of a step and its bytes; only these where the compiler runs out of memory.

    The step is lowered or compiled, or an ``Audit``. Bytes are infinite where the compiler does not
    say how many it needs.
    """
    try:
        step = make_step()
        found = step if isinstance(step, Audit) else audit(step, device=kind, **options)
        return found, found.memory
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        match = re.search(r"Used ([\d.]+)([KMGT]?)", str(error))
        return None, float(match[1]) * _UNITS[match[2]] if match else float("inf")


def needed(nbytes: float) -> str:
    """The memory of a step in words; infinite where the compiler failed without a figure."""
    return size(nbytes) if nbytes < float("inf") else "more than there is"
