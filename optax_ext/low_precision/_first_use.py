"""The first use of a format on an accelerator: whether its codes come back as they should.

On the first H100 that this library met, a compiler stored every 8-bit code as 255: nothing but a
worse loss would have shown it. So the first state of a format is preceded by an encoding and a
decoding of known numbers, once for each kind of device and version of its compiler.
"""

import functools
import importlib.metadata
import json
import pathlib
from typing import Any

import jax
import numpy as np

from optax_ext.low_precision._formats import Format
from optax_ext.low_precision._quantize import dequantize, quantize

# The largest norm of the error of the numbers below, by bits, relative to theirs: twice what they
# have. Codes that are all the same are off by more than 1.
_ALLOWED = {16: 0.004, 8: 0.08, 4: 0.85}
_FILE = "optax_ext_codes.json"  # in the folder of JAX's compilation cache, if there is one


def check_codes(fmt: Format, rounding: str) -> None:
    """Raises if codes of a format do not come back on the devices of this process.

    Nothing is checked on CPUs, where the tests of this library run. What was right once is
    remembered in this process, and in the folder of JAX's compilation cache, if it has one.

    Raises:
      RuntimeError: that names the device, the format, and how far values are off.
    """
    if jax.default_backend() != "cpu":
        _check_once(fmt, "compensated" if rounding == "compensated" else "nearest")


@functools.cache
def _check_once(fmt: Format, rounding: str) -> None:
    device = jax.local_devices()[0]
    name = f"{device.device_kind}, {_compiler(device)}: {fmt}, {rounding}"
    if name in _remembered():
        return
    error = max(_error(fmt, signed, rounding) for signed in (True, False))
    if not error <= _ALLOWED[fmt.bits]:
        raise RuntimeError(
            f"on {device.device_kind}, values stored as {fmt} differ by {error:.2g} of their norm, "
            f"where {_ALLOWED[fmt.bits]} is the most that rounding makes: its compiler turned a "
            "right program into a wrong one. Use another format or float32 state, and run "
            "`optax-ext check` for a report."
        )
    _remember(name)


def _error(fmt: Format, signed: bool, rounding: str) -> float:
    """Of numbers over four powers of ten, by a program of each way."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 512)) * 10.0 ** rng.uniform(-4, 0, (64, 512))).astype(np.float32)
    x = x if signed else np.abs(x)
    with jax.ensure_compile_time_eval():  # also where a step is being traced
        stored = jax.jit(lambda x: quantize(x, fmt, signed, rounding))(x)
        back = np.asarray(jax.jit(dequantize)(stored), np.float64)
    return float(np.linalg.norm(back - x) / np.linalg.norm(x))


def _compiler(device: jax.Device) -> str:
    """The versions of jaxlib, and of a plugin such as libtpu, which is installed on its own."""
    plugin = " ".join(str(device.client.platform_version).split())
    return f"jaxlib {importlib.metadata.version('jaxlib')}, {plugin}"


def _file() -> pathlib.Path | None:
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    return pathlib.Path(folder) / _FILE if folder and "://" not in folder else None


def _remembered() -> list[str]:
    file = _file()
    try:
        found: Any = json.loads(file.read_text()) if file else []
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _remember(name: str) -> None:
    """A file that cannot be written is no reason to stop: the next process checks again."""
    file = _file()
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(sorted({*_remembered(), name}), indent=1))
    except OSError:
        return
