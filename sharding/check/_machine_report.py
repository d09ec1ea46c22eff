"""What a check of a machine found, as a table, as JSON, and as text for a report of a fault."""

import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from optax_ext import __version__
from sharding.plan._format import Printed, Table

# Flags that change what runs; others may hold paths or names of hosts.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAX_DEFAULT_MATMUL_PRECISION")


class NotHere(Exception):
    """Raised by a check that this machine has nothing for; says why."""


class Slow(Exception):
    """Raised by a check of what is right, but slower than another form; says by how much."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one check found.

    Attributes:
      name: what was checked, beside what.
      status: ``"ok"``, ``"differs"``, ``"failed"`` (an error), ``"slow"``, or ``"not here"``.
      difference: as a share of what is allowed, above 1 if it differs; None if it was not compared.
      seconds: that it took, compiling included.
      reason: the error, why it is not here, or how slow it is.
      affects: which features use what was checked.
      instead: what to switch off.
    """

    name: str
    status: str
    difference: float | None
    seconds: float
    reason: str = ""
    affects: str = ""
    instead: str = ""


class MachineCheck(NamedTuple):
    """One comparison."""

    name: str  #: what is compared, beside what
    run: Callable[[], float]  #: the difference, as a share of what is allowed; raises ``NotHere``
    affects: str  #: which features use it
    instead: str  #: what to switch off where it differs


@dataclasses.dataclass(frozen=True)
class MachineReport(Printed):
    """All outcomes, and what the machine is; printed, a text to paste into a report of a fault.

    Attributes:
      machine: versions, devices, processes and flags, without names of hosts or people.
      outcomes: of all checks, in their order.
    """

    machine: Mapping[str, Any]
    outcomes: Sequence[Outcome]

    derived = ("ok",)

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and no check failed."""
        return all(found.status in ("ok", "slow", "not here") for found in self.outcomes)

    def tables(self) -> list[Table]:
        """The outcomes."""
        rows = [
            (
                found.name,
                found.status,
                "" if found.difference is None else f"{found.difference:.2g}",
                f"{found.seconds:.1f}",
            )
            for found in self.outcomes
        ]
        about = ", ".join(f"{key} {value}" for key, value in self.machine.items() if value)
        columns = ("check", "status", "difference / allowed", "seconds")
        return [Table(about, columns, rows)]

    @property
    def sentences(self) -> list[str]:
        """What differs, what that affects, and what to do; then a summary."""
        lines, absent = [], dict[str, list[str]]()
        for found in self.outcomes:
            if found.status == "not here":
                absent.setdefault(found.reason, []).append(found.name)
            elif found.status != "ok":
                what = found.reason or f"{found.difference:.3g} times what is allowed"
                lines += [
                    f"{found.status}: {found.name}: {what}.",
                    f"  It affects {found.affects}. Until it is mended: {found.instead}.",
                ]
        lines += [f"not here, as {why}: {'; '.join(names)}." for why, names in absent.items()]
        bad = sum(found.status in ("differs", "failed") for found in self.outcomes)
        seconds = sum(found.seconds for found in self.outcomes)
        total = f"{len(self.outcomes)} checks in {seconds:.0f} s: "
        return [*lines, total + (f"{bad} differ or failed." if bad else "nothing differs.")]


def describe_machine() -> dict[str, Any]:
    """Versions, devices, processes and flags."""
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    coords = [getattr(device, "coords", None) for device in devices]
    sides = zip(*coords, strict=True) if all(coords) else ()
    return {
        "optax-ext": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "Python": platform.python_version(),
        "platform": devices[0].client.platform_version.splitlines()[0],
        "devices": f"{len(devices)} x {', '.join(kinds)}",
        "torus": "x".join(str(max(side) + 1) for side in sides),
        "processes": jax.process_count(),
        **{name: os.environ[name] for name in _FLAGS if os.environ.get(name)},
    }


def run_checks(
    checks: Iterable[MachineCheck], progress: Callable[[Outcome], object] = lambda found: None
) -> list[Outcome]:
    """Runs checks one after the other; ``progress`` gets each outcome."""
    outcomes = []
    for check in checks:
        found = _outcome(check)
        progress(found)
        outcomes.append(found)
    return outcomes


def _outcome(check: MachineCheck) -> Outcome:
    status, difference, reason, start = "ok", None, "", time.perf_counter()
    try:
        difference = float(check.run())
        if not difference <= 1:  # NaN, too
            status = "differs"
    except NotHere as error:
        status, reason = "not here", str(error)
    except Slow as error:
        status, reason = "slow", str(error)
    except Exception as error:  # a compiler's, a driver's: the report must be whole
        first = str(error).strip().splitlines() or [""]
        status, reason = "failed", f"{type(error).__name__}: {first[0][:300]}"
    seconds = time.perf_counter() - start
    return Outcome(check.name, status, difference, seconds, reason, check.affects, check.instead)
