"""Quantized products: programs for H100 and v5e beside bfloat16's, and what a decoder learns.

Programs are the value and gradient of decoders of Llama 2's shapes, of a few layers, on 8,192
tokens. They are compiled, not run; the compilers are those of ``SHARDING_COMPILERS``. A decoder of
0.7M parameters learns the bytes of this repository's documentation in each recipe.

  python benchmarks/quantized_matmuls.py programs
  python benchmarks/quantized_matmuls.py learning --seeds 5 --steps 1000
  python benchmarks/quantized_matmuls.py --smoke    # a few steps of a tiny decoder, prints only
"""

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _transformer import Config, init, make_loss

import sharding as shd
from sharding import matmuls
from sharding.plan import targets

sys.path.append(str(_results.ROOT / "examples"))
from _corpus import Corpus

# --- Programs -------------------------------------------------------------------------------------

LAYERS, VOCABULARY, ROWS, LENGTH = 8, 32000, 4, 2048
MODELS = {"7B": (4096, 11008, 32), "13B": (5120, 13824, 40)}  # width, hidden, heads
RECIPES = {"h100x1": "fp8", "v5e:1x1": "int8"}


def norm(x: jax.Array) -> jax.Array:
    """By the root of the mean square of features."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype)


def decoder(model: str) -> tuple[Callable[..., jax.Array], Any, Any]:
    """A loss of a decoder, and the types of its parameters and of its tokens."""
    width, hidden, heads = MODELS[model]

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    layers = {"qkv": of(LAYERS, width, 3 * width), "out": of(LAYERS, width, width)}
    layers |= {"gate": of(LAYERS, width, 2 * hidden), "down": of(LAYERS, hidden, width)}
    params = {"embed": of(VOCABULARY, width), "layers": layers, "head": of(width, VOCABULARY)}

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        q, k, v = jnp.split(norm(x) @ p["qkv"], 3, -1)
        q, k, v = (a.reshape(*a.shape[:2], heads, width // heads) for a in (q, k, v))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.reshape(x.shape) @ p["out"]
        a, b = jnp.split(norm(x) @ p["gate"], 2, -1)
        return x + (jax.nn.silu(a) * b) @ p["down"], None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        logits = (norm(x) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss, params, jax.ShapeDtypeStruct((ROWS, LENGTH + 1), jnp.int32)


def products_by_type(text: str) -> Counter[tuple[str, ...]]:
    """How many products a program has, by the types of their operands."""
    types = dict(re.findall(r"%?([\w.\-]+) = (\w+)\[", text))
    found = re.findall(r" (?:dot|convolution|custom-call)\(%?([\w.\-]+), %?([\w.\-]+)[,)]", text)
    return Counter((types.get(a, "?"), types.get(b, "?")) for a, b in found)


def program_rows(smoke: bool) -> Iterator[str]:
    """A row for each program."""
    for target, recipe in RECIPES.items():
        for model in ["7B"] if smoke else MODELS:
            loss, params, tokens = decoder(model)
            low = shd.quantized_matmuls(loss, recipe)
            share = matmuls.report_products(low, params, tokens).share
            place = jax.sharding.SingleDeviceSharding(targets.topology(target)[0])
            args = jax.tree.map(lambda t: t.update(sharding=place), (params, tokens))  # noqa: B023
            for name, fn in (("bfloat16", loss), (recipe, low)):
                program = jax.jit(jax.value_and_grad(fn)).lower(*args).compile()
                yield program_row(target, model, name, program, share)


def program_row(target: str, model: str, name: str, program: Any, share: float) -> str:
    """Seconds are the bounds of products, at twice the rate where quantized, and of bytes."""
    audit = shd.audit(program)
    moved = sum(audit.nbytes.values())
    flops = sum(audit.flops.values())
    temporaries = program.memory_analysis().temp_size_in_bytes
    rate, bandwidth = {"h100x1": (989e12, 3.35e12), "v5e:1x1": (197e12, 0.819e12)}[target]
    share = 0.0 if name == "bfloat16" else share
    seconds = flops * (1 - share / 2) / rate
    types = products_by_type(program.as_text())
    few = sum(n for pair, n in types.items() if any(t[:2] in ("f8", "s8") for t in pair))
    return (
        f"| {target} | {model} | {name} | {share:.1%} | {few} of {sum(types.values())} | "
        f"{flops / 1e12:.0f} | {moved / 2**30:.0f} | {temporaries / 2**30:.2f} | "
        f"{1e3 * seconds:.0f} | {1e3 * moved / bandwidth:.0f} |"
    )


PROGRAM_HEADER = """\
| target | shapes | products | share quantized | few-bit operands | TFLOP | GiB moved | \
GiB temporaries | ms, products | ms, bytes |
|---|---|---|---|---|---|---|---|---|---|"""

# --- Learning -------------------------------------------------------------------------------------

BATCH, CONTEXT = 16, 64


def last_fifth(
    loss: Callable[..., jax.Array], seed: int, steps: int, config: Config, corpus: Corpus
) -> float:
    """The mean training loss of the last fifth of the steps."""
    tx = optax.adam(2e-3)

    @jax.jit
    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = init(config)
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    params = jax.tree.map(
        lambda x: x if x.ndim < 3 else 0.05 * jax.random.normal(next(keys), x.shape), params
    )
    state, values = tx.init(params), []
    for i in range(steps):
        tokens = corpus.batch(seed, i, BATCH).astype(np.int32)
        params, state, value = step(params, state, tokens)
        values.append(float(value))
    return float(np.mean(values[-steps // 5 :]))


def learning_rows(seeds: int, steps: int, config: Config) -> Iterator[str]:
    """A row for each recipe."""
    corpus = Corpus(_results.ROOT / "docs", CONTEXT)
    loss = make_loss()
    losses = {"float32": loss} | {
        name: shd.quantized_matmuls(loss, name, min_size=0, simulate=True)
        for name in matmuls.RECIPES
        if name != "identity"
    }
    plain: list[float] = []
    for name, fn in losses.items():
        found = [last_fifth(fn, seed, steps, config, corpus) for seed in range(seeds)]
        plain = plain or found
        ratios = np.array(found) / np.array(plain) - 1
        each = ", ".join(f"{100 * ratio:+.2f}" for ratio in ratios)
        yield f"| {name} | {np.mean(found):.4f} | {100 * ratios.mean():+.2f} | {each} |"


LEARNING_HEADER = """\
| recipe | loss | % above float32 | by seed |
|---|---|---|---|"""


def main() -> None:
    """Runs one part, and writes its section."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["programs", "learning"], nargs="?", default="learning")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=128, help="32 times the layers")
    parser.add_argument("--smoke", action="store_true", help="a little of it; prints only")
    args = parser.parse_args()
    if args.part == "programs":
        rows, header, about = program_rows(args.smoke), PROGRAM_HEADER, ABOUT_PROGRAMS
    else:
        steps, seeds = (4, 1) if args.smoke else (args.steps, args.seeds)
        width = 32 if args.smoke else args.width
        config = Config(layers=width // 32, width=width, vocabulary=256)
        rows, header = learning_rows(seeds, steps, config), LEARNING_HEADER
        millions = f"{config.num_params / 1e6:.1f}M"
        about = ABOUT_LEARNING.format(steps=steps, seeds=seeds, parameters=millions)
    made = _results.table(header, rows)
    if not args.smoke:
        title = args.part.capitalize()
        script = "quantized_matmuls.py " + " ".join(sys.argv[1:])
        path = _results.RESULTS / "quantized_matmuls.md"
        if not path.exists():
            path.write_text("# Quantized products\n")
        _results.write_section("quantized_matmuls", title, about, made, script)


ABOUT_PROGRAMS = """The value and gradient of decoders of 8 layers of Llama 2's shapes, 8,192
tokens, each layer in a checkpoint. Compiled, not run. The times are bounds: of products, at twice
the rate of bfloat16 for the share that is quantized, and of bytes, at the bandwidth of memory."""
ABOUT_LEARNING = """The mean training loss of the last fifth of {steps} steps of a decoder of
{parameters} parameters on the bytes of docs/, {seeds} seeds; each recipe from the same start with
the same batches. Products of all sizes are quantized but those of attention and of the tied head.
Recipes of 4 bits, and mxfp8, are simulated in float32."""


if __name__ == "__main__":
    main()
