"""Checks of one device: codes of all formats, rounding, updates of few-bit state."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext
from optax_ext.low_precision import dequantize, error_of_codes, kernels_beside_xla, quantize
from sharding.check._machine_report import MachineCheck, NotHere

_FORMATS = {
    "dynamic 8 bits": optax_ext.Dynamic(8),
    "dynamic 4 bits": optax_ext.Dynamic(4),
    "linear 8 bits": optax_ext.Linear(8),
    "linear 4 bits": optax_ext.Linear(4),
    "linear 4 bits, rows and columns": optax_ext.Linear(4, rank1=True),
    "float8": optax_ext.Float8(),
    "float8 without a power": optax_ext.Float8(expand=False),
    "bfloat16": optax_ext.BFloat16(),
}
# Updates of few-bit state, the same with float32 state, and how far what they move may be apart.
_ADAMW, _CAME = optax.adamw(1e-3), optax_ext.came(1e-3)
_OPTIMIZERS = {
    "adamw8bit": (optax_ext.adamw8bit(1e-3), _ADAMW, 0.15),
    "came8bit": (optax_ext.came8bit(1e-3), _CAME, 0.9),
    "4-bit AdamW": (optax_ext.low_precision_state(_ADAMW, 4, rounding="nearest"), _ADAMW, 0.45),
    "CAME": (_CAME, _CAME, 1e-3),
}


def cpu_device() -> jax.Device:
    """A CPU of this process, beside the accelerators."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise NotHere("jax has no CPU beside it: JAX_PLATFORMS lacks ',cpu'") from None


def both(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """What a function returns on the first device of this process, and on a CPU; as NumPy."""
    found = []
    for device in (jax.local_devices()[0], cpu_device()):
        with jax.default_device(device), jax.default_matmul_precision("float32"):
            placed = jax.tree.map(lambda x, device=device: jax.device_put(x, device), args)
            found.append(jax.device_get(jax.jit(fn)(*placed)))
    return found[0], found[1]


def apart(have: Any, want: Any) -> float:
    """The relative norm of the difference; infinite if it is not finite."""
    squares = [0.0, 0.0]
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        squares[0] += float(np.sum((a - b) ** 2))
        squares[1] += float(np.sum(b**2))
    found = np.sqrt(squares[0] / squares[1]) if squares[1] else np.sqrt(squares[0])
    return float(found) if np.isfinite(found) else np.inf


def number_checks() -> Iterator[MachineCheck]:
    """Of one device."""
    for name, fmt in _FORMATS.items():
        yield MachineCheck(
            f"codes: {name}, there and back",
            functools.partial(_compare_codes, fmt),
            "optimizer state, frozen parameters and gathers of that format",
            "another format, or float32 state",
        )
    yield MachineCheck(
        "rounding: the mean of stochastically rounded codes and parameters",
        _compare_rounding,
        "low_precision_state and stochastic_rounding",
        'rounding="nearest" or "compensated", and float32 parameters',
    )
    for name, options in _OPTIMIZERS.items():
        yield MachineCheck(
            f"update: ten of {name} beside the CPU's",
            functools.partial(_compare_updates, *options),
            f"{name}; on TPUs its kernel",
            "the same optimizer with float32 state, or optax's",
        )
    yield MachineCheck(
        "update: the kernel of 8-bit state beside XLA's form",
        _compare_kernel,
        "8-bit optimizers, which then run without it",
        "float32 state, if the update above differs, too",
    )


def _spread_values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Of both signs, over seven powers of ten, with zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-7, 0, shape)
    x.flat[:: x.size // 7] = 0
    return x.astype(np.float32)


def _compare_codes(fmt: Any) -> float:
    """Codes and values beside the CPU's, and values beside what was stored, as at first use.

    Of 1,000 codes one may be a neighbour: divisions differ.
    """
    results = []

    def compute(fn: Callable[..., Any], x: Any) -> Any:
        results.append(both(fn, x))
        return results[-1][0]

    worst = error_of_codes(fmt, compute=compute)
    coded, values = results  # the values of the same codes
    for have, want in zip(*coded, strict=True):
        codes, expected = (np.asarray(q.codes).view(np.uint8) for q in (have, want))
        worst = max(worst, float(np.mean(codes != expected)) / 1e-3)
    return max(worst, apart(*values) / 1e-5)


def _compare_kernel() -> float:
    if jax.default_backend() != "tpu":
        raise NotHere("kernels are for TPUs")
    return kernels_beside_xla(optax_ext.Dynamic(8))


def _compare_rounding() -> float:
    """In standard deviations, of which six are allowed."""
    count = 1 << 16
    x = np.full((256, count // 256), 0.3003, np.float32)
    x[:, 0] = 1.0  # the scale of each block

    def mean_of_codes(x: jax.Array) -> jax.Array:
        noise = jax.random.uniform(jax.random.key(0), x.shape)
        return dequantize(quantize(x, optax_ext.Linear(8), True, "stochastic", noise))[:, 1:].mean()

    deviation = np.sqrt(0.25 / count)  # of a mean, in steps of a code or a parameter
    have, _ = both(mean_of_codes, x)
    worst = abs(float(have) - 0.3003) / (deviation / 127) / 6

    def mean_of_params(p: jax.Array) -> jax.Array:
        moved = optax_ext.apply_updates(p, jnp.full(p.shape, 1e-3), jax.random.key(1))
        return jnp.mean(moved, dtype=jnp.float32)

    have, _ = both(mean_of_params, np.ones(count, jnp.bfloat16))
    return max(worst, abs(float(have) - 1.001) / (deviation / 128) / 6)


def _compare_updates(tx: Any, plain: Any, allowed: float) -> float:
    """What ten updates move: beside the CPU by 1 %, as codes round either way; and in float32."""
    have, want = _ten_updates(tx)
    return max(apart(have, want) / 1e-2, apart(have, _ten_updates(plain)[1]) / allowed)


@functools.cache
def _ten_updates(tx: Any) -> tuple[Any, Any]:
    """What ten updates move, on this device and on a CPU."""
    params = {"w": _spread_values((256, 512)), "b": _spread_values((512,))}

    def ten(params: Any) -> Any:
        def one(carry: Any, i: jax.Array) -> Any:
            params, state = carry
            grads = jax.tree.map(lambda x: jnp.sin(x * 1000 + i), params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (after, _), _ = jax.lax.scan(one, (params, tx.init(params)), jnp.arange(10.0))
        return jax.tree.map(jnp.subtract, after, params)

    return both(ten, params)
