"""The first use of a format on an accelerator: whether codes come back, and kernels are right.

On the first H100 that this library met, a compiler stored every 8-bit code as 255: nothing but a
worse loss would have shown it. So the first state of a format is preceded by an encoding and a
decoding of known numbers, and on TPUs by two small updates by a kernel, once for each kind of
device and version of its compiler.
"""

import functools
import importlib.metadata
import json
import pathlib
import warnings
from collections.abc import Callable
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
    error = error_of_codes(fmt, rounding)
    if not error <= 1:
        raise RuntimeError(
            f"on {device.device_kind}, values stored as {fmt} differ by {error:.2g} times the most "
            "that rounding makes: its compiler turned a right program into a wrong one. Use "
            "another format or float32 state, and run `optax-ext check` for a report."
        )
    _remember(name)


def _computed(fn: Callable[..., Any], x: Any) -> Any:
    """What a program computes, also where a step is being traced; in the memory of the host."""
    return jax.device_get(jax.jit(fn).lower(x).compile()(x))


def error_of_codes(
    fmt: Format, rounding: str = "nearest", *, compute: Callable[..., Any] = _computed
) -> float:
    """How far values are off that are encoded and decoded on the first device of this process.

    Args:
      fmt: of the codes.
      rounding: of values to codes.
      compute: runs a function, of encoding and then of decoding, of an argument, by a program.

    Returns:
      The norm of the difference, as a share of the most that rounding makes; above 1 it is wrong.
    """
    return max(_errors(fmt, rounding, compute)) / _ALLOWED[fmt.bits]


_RIGHT: dict[tuple[Format, str], bool] = {}  # whether kernels are, of what was checked


def kernels_are_right(fmt: Format, rounding: str) -> bool:
    """Whether a step may run in kernels, by ``check_kernels``; true where nothing was checked."""
    return _RIGHT.get((fmt, rounding), True)


def check_kernels(fmt: Format, rounding: str, steps: Callable[[Any], Any]) -> None:
    """Compares kernels of a format with XLA's form, which takes their place if they differ.

    On TPUs alone, and once, as ``check_codes``. A kernel that does not compile differs, too.

    Args:
      fmt: of the moments.
      rounding: of their codes.
      steps: a small state after updates by kernels, if ``kernels_are_right``, of random numbers.
    """
    if jax.default_backend() != "tpu" or (fmt, rounding) in _RIGHT:
        return
    device = jax.local_devices()[0]
    name = f"{device.device_kind}, {_compiler(device)}: kernels of {fmt}, {rounding}"
    _RIGHT[fmt, rounding] = True
    if name in _remembered():
        return
    try:
        error = error_of_kernels(fmt, rounding, steps)
        found = f"differ from XLA's form by {error:.2g} times what rounding makes"
    except Exception as failed:  # of any compiler
        error, found = np.inf, f"failed ({str(failed).splitlines()[0][:200]})"
    if error <= 1:
        return _remember(name)
    _RIGHT[fmt, rounding] = False
    warnings.warn(
        f"on {device.device_kind}, kernels of {fmt} {found}: XLA's form takes their place, which "
        "moves more bytes. Run `optax-ext check` for a report.",
        stacklevel=2,
    )


def error_of_kernels(fmt: Format, rounding: str, steps: Callable[[Any], Any]) -> float:
    """How far a result of kernels is from that of XLA's form, as a share of what is allowed.

    Both round elsewhere, as XLA fuses them: of 1,000 codes five may be neighbours, whose updates
    change floats by 1e-3 of their norm. Arguments are those of ``check_kernels``.
    """
    x = np.random.default_rng(0).standard_normal((2, 70, 300)).astype(np.float32)
    before = kernels_are_right(fmt, rounding)

    def both_forms(x: Any) -> list[Any]:
        made = []
        for form in (True, False):
            _RIGHT[fmt, rounding] = form
            made.append(steps(x))
        return made

    try:
        made = _computed(both_forms, x)
    finally:
        _RIGHT[fmt, rounding] = before
    worst = 0.0
    for have, want in zip(*map(jax.tree.leaves, made), strict=True):
        if want.dtype.itemsize == 1:
            worst = max(worst, float(np.mean(have != want)) / 5e-3)
        else:
            size = max(float(np.linalg.norm(want)), 1e-30)
            apart = float(np.linalg.norm(np.float64(have) - want)) / size
            worst = max(worst, apart / 1e-3 if np.isfinite(apart) else np.inf)
    return worst


def _errors(fmt: Format, rounding: str, compute: Callable[..., Any]) -> list[float]:
    """Of numbers over four powers of ten, of both signs and of one, by a program of each way."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 512)) * 10.0 ** rng.uniform(-4, 0, (64, 512))).astype(np.float32)

    def encode(x: Any) -> Any:
        return [quantize(x, fmt, True, rounding), quantize(abs(x), fmt, False, rounding)]

    stored = compute(encode, x)
    back = compute(lambda stored: [dequantize(q) for q in stored], stored)
    return [
        float(np.linalg.norm(np.float64(have) - want) / np.linalg.norm(want))
        for have, want in zip(back, (x, np.abs(x)), strict=True)
    ]


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
