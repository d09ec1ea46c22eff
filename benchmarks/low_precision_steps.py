"""How far steps with low-precision state are from those of float32, where columns span decades.

Gradients of a matrix are a constant direction and noise; their columns have scales from 1 down to
10^-decades, in random order. Both runs see the same gradients. For each format, rounding and
optimizer two figures: the largest element of an update over the largest of float32 in the same
step, the maximum over all steps; and the error of the sum of all updates, relative to that sum in
float32.

  python benchmarks/low_precision_steps.py            # writes benchmarks/results/
  python benchmarks/low_precision_steps.py --smoke    # few steps and formats, prints only
"""

import argparse
from collections.abc import Iterator

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext
from optax_ext import Float8

SHAPE = (256, 512)
DECADES = range(7)
FORMATS = {"8bit": 8, "4bit": 4, "fp8": Float8(), "bfloat16": 16}
ROUNDINGS = ("nearest", "stochastic", "compensated")
OPTIMIZERS = {
    "AdamW": optax.adamw(1.0, weight_decay=0.0),
    "Lion": optax.lion(1.0, weight_decay=0.0),
    "LAMB": optax_ext.lamb(1.0),
    "CAME": optax_ext.came(1.0),
    "Adafactor": optax_ext.adafactor(1.0, momentum=0.9, factoring=optax_ext.last_two_dims()),
}


def run(
    plain: optax.GradientTransformation, low: optax.GradientTransformation, steps: int
) -> jax.stages.Wrapped:
    """A function of the columns' scales: the largest ratio of elements, the error of the sum."""
    params = jnp.ones(SHAPE)
    direction = jax.random.normal(jax.random.key(0), SHAPE)

    @jax.jit
    def measure(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
            states, sums = carry
            grads = (0.5 * direction + jax.random.normal(key, SHAPE)) * scales[None]
            pairs = [
                tx.update(grads, state, params)
                for tx, state in zip((plain, low), states, strict=True)
            ]
            most = [jnp.max(jnp.abs(updates)) for updates, _ in pairs]
            sums = tuple(s + updates for s, (updates, _) in zip(sums, pairs, strict=True))
            return (tuple(state for _, state in pairs), sums), most[1] / most[0]

        start = (plain.init(params), low.init(params)), (jnp.zeros(SHAPE), jnp.zeros(SHAPE))
        keys = jax.random.split(jax.random.key(1), steps)
        (_, (want, have)), ratios = jax.lax.scan(step, start, keys)
        return jnp.max(ratios), jnp.linalg.norm(have - want) / jnp.linalg.norm(want)

    return measure


def scales_of(decades: int) -> jax.Array:
    """Of each column, in random order."""
    spread = 10.0 ** -np.linspace(0, decades, SHAPE[1])
    return jnp.asarray(np.random.default_rng(0).permutation(spread), jnp.float32)


def rows(steps: int, formats: dict, roundings: tuple, optimizers: dict) -> Iterator[str]:
    """The lines of the table."""
    for optimizer, plain in optimizers.items():
        for name, bits in formats.items():
            for rounding in (*roundings, None):
                options = {} if rounding is None else {"rounding": rounding}
                low = optax_ext.low_precision_state(plain, bits, **options)
                measure = run(plain, low, steps)
                found = [jax.device_get(measure(scales_of(d))) for d in DECADES]
                cells = [f"{ratio:.2g}, {error:.2g}" for ratio, error in found]
                label = rounding or "default"
                yield f"| {optimizer} | {name} | {label} | {' | '.join(cells)} |"


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="few steps and formats; no file")
    smoke = parser.parse_args().smoke
    header = (
        f"| optimizer | format | rounding | {' | '.join(f'{d} decades' for d in DECADES)} |\n"
        f"{'|---' * (3 + len(DECADES))}|"
    )
    if smoke:
        lines = rows(5, {"4bit": 4}, ROUNDINGS[:1], {"AdamW": OPTIMIZERS["AdamW"]})
    else:
        lines = rows(300, FORMATS, ROUNDINGS, OPTIMIZERS)
    text = _results.table(header, lines)
    if not smoke:
        about = (
            f"Matrices of {SHAPE}, 300 steps. Each cell: the largest element of an update over the "
            "largest that float32 makes in the same step (worst step), and the error of the sum "
            "of all updates."
        )
        _results.write("low_precision_steps", "Steps with low-precision state", about, text)


if __name__ == "__main__":
    main()
