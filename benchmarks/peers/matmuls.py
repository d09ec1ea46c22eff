"""Training with products in 8 bits beside qwix, of a model of flax.linen and of one of flax.nnx.

The same model, first parameters, batches and optimizer: an MLP that names rendered characters.

  python benchmarks/peers/matmuls.py            # writes results/peers_matmuls.md; needs qwix
  python benchmarks/peers/matmuls.py --smoke    # four steps, prints only
"""

import argparse
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measured import lines_of
from _small_tasks import CHARACTERS, SIDE, character_batch, cross_entropy
from flax import linen, nnx

import sharding as shd

WIDTH, HIDDEN = 128, 3
TX = optax.adam(2e-3)
FORMATS = {"int8": ("int8", "int8"), "fp8": ("float8_e4m3fn", "float8_e5m2")}
HEADER = """
| model | products | library | few-bit products | loss | lines |
|---|---|---|---|---|---|
""".strip()


class Linen(linen.Module):
    """Three layers that add to what they read, and a head."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits."""
        x = linen.Dense(WIDTH, name="first")(x)
        for i in range(HIDDEN):
            x = x + linen.Dense(WIDTH, name=f"layers_{i}")(linen.relu(x))
        return linen.Dense(len(CHARACTERS), name="head")(linen.relu(x))


class Nnx(nnx.Module):
    """The same."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(SIDE**2, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(HIDDEN)])
        self.head = nnx.Linear(WIDTH, len(CHARACTERS), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(nnx.relu(x))
        return self.head(nnx.relu(x))


def mean_loss(apply: Callable[..., jax.Array], model: Any, batch: Any) -> jax.Array:
    """The mean cross entropy of a batch."""
    return cross_entropy(apply(model, batch["images"].reshape(-1, SIDE**2)), batch["labels"])


# --- The user's code, of which lines are counted --------------------------------------------------


def ours(apply: Callable[..., jax.Array], model: Any, recipe: str) -> tuple[Any, Any]:
    """The loss, as it is; the head is kept by itself."""
    loss = lambda model, batch: mean_loss(apply, model, batch)  # noqa: E731
    return shd.quantized_matmuls(loss, recipe, min_size=0), model


def of_qwix(apply: Callable[..., jax.Array], model: Any, recipe: str) -> tuple[Any, Any]:
    """A module whose calls qwix intercepts; one of nnx is called once."""
    import qwix

    forward, backward = FORMATS[recipe]
    types = {"weight_qtype": forward, "act_qtype": forward, "bwd_qtype": backward}
    rules = [qwix.QtRule(module_path="layers.*", **types)]
    provider = qwix.QtProvider(rules)
    if isinstance(model, nnx.Module):
        model = qwix.quantize_model(model, provider, jnp.zeros((1, SIDE**2)))
    else:
        apply = qwix.quantize_model(Linen(), provider).apply
    return lambda model, batch: mean_loss(apply, model, batch), model


# --- Training -------------------------------------------------------------------------------------


def trained(loss: Any, model: Any, steps: int) -> tuple[float, int]:
    """The mean loss of the last fifth of the steps, and how many products have few bits."""
    graph, params = nnx.split(model) if isinstance(model, nnx.Module) else (None, model)

    def of_params(params: Any, batch: Any) -> jax.Array:
        return loss(params if graph is None else nnx.merge(graph, params), batch)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(of_params)(params, batch)
        updates, state = TX.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    state, values = TX.init(params), []
    text = step.lower(params, state, character_batch(0, 0)).as_text()
    found = re.findall(r"stablehlo.dot_general.*: \(tensor<\S*x(?:i8|f8\w+)>", text)
    for i in range(steps):
        params, state, value = step(params, state, character_batch(0, i))
        values.append(float(value))
    return float(np.mean(values[-steps // 5 :])), len(found)


def rows(steps: int) -> Iterator[str]:
    """A row for each model, format and library."""
    images = jnp.zeros((1, SIDE**2))
    models = {
        "linen": (lambda: Linen().init(jax.random.key(0), images), Linen().apply),
        "nnx": (lambda: Nnx(nnx.Rngs(0)), lambda model, x: model(x)),
    }
    for name, (make, apply) in models.items():
        plain = trained(lambda m, batch: mean_loss(apply, m, batch), make(), steps)  # noqa: B023
        yield f"| {name} | float32 | - | {plain[1]} | {plain[0]:.4f} | |"
        for recipe in FORMATS:
            for library in (ours, of_qwix):
                label = {"ours": "this library", "of_qwix": "qwix"}[library.__name__]
                try:
                    loss, number = trained(*library(apply, make(), recipe), steps)
                except ImportError as error:
                    yield f"| {name} | {recipe} | {label} | {error} | | |"
                    continue
                lines = lines_of(library)
                yield f"| {name} | {recipe} | {label} | {number} | {loss:.4f} | {lines} |"


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    steps = 4 if smoke else 200
    table = _results.table(HEADER, rows(steps))
    if not smoke:
        about = ABOUT.format(steps=steps, layers=HIDDEN)
        title = "Training with products in 8 bits"
        _results.write("peers_matmuls", title, about, table, script="peers/matmuls")


ABOUT = """An MLP of {layers} layers of width 128 on rendered characters: the mean loss of the last
fifth of {steps} steps of Adam, one seed. Few-bit products are those of the step as it is lowered,
forward and backward; of the {layers} layers there are nine. Lines are the user's, without imports,
from a loss to one whose products have 8 bits. Both have a scale a row, qwix rounds cotangents to
nearest. This library keeps the head by itself, and qwix what no rule names. qwix 0.1.8."""

if __name__ == "__main__":
    main()
