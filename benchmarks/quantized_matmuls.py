"""Quantized products: programs for H100 and v5e beside bfloat16's, and what models learn.

Programs are the value and gradient of decoders of Llama 2's shapes, of a few layers, on 8,192
tokens. They are compiled, not run; the compilers are those of ``SHARDING_COMPILERS``. A small
decoder, a ViT and an MLP learn in each recipe.

  python benchmarks/quantized_matmuls.py programs
  python benchmarks/quantized_matmuls.py wire
  python benchmarks/quantized_matmuls.py learning --seeds 5 --steps 1000
  python benchmarks/quantized_matmuls.py --smoke    # a few steps of a tiny decoder, prints only
"""

import argparse
import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _small_tasks import SmallTask, decoder, mlp, vit

import sharding as shd
from sharding import matmuls
from sharding.plan import targets

sys.path.append(str(_results.ROOT / "examples"))
from _corpus import Corpus

# --- Programs -------------------------------------------------------------------------------------

LAYERS, VOCABULARY, ROWS, LENGTH = 8, 32000, 4, 2048
MODELS = {"7B": (4096, 11008, 32), "13B": (5120, 13824, 40)}  # width, hidden, heads
RECIPES = {"h100x1": ("fp8", "fp8_delayed"), "v5e:1x1": ("int8", "int8_delayed")}


def norm(x: jax.Array) -> jax.Array:
    """By the root of the mean square of features."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype)


def large_decoder(model: str, depth: int = LAYERS) -> tuple[Callable[..., jax.Array], Any, Any]:
    """A loss of a decoder, and the types of its parameters and of its tokens."""
    width, hidden, heads = MODELS[model]

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"gate": (width, 2 * hidden), "down": (hidden, width)}
    layers = {name: of(depth, *shape) for name, shape in shapes.items()}
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


def program_rows(models: Sequence[str], recipes: Sequence[str]) -> Iterator[str]:
    """A row for each program of some recipes."""
    for target, of_target in RECIPES.items():
        place = jax.sharding.SingleDeviceSharding(targets.topology(target)[0])
        for model in models:
            loss, params, tokens = large_decoder(model)
            for name in ("bfloat16", *of_target):
                if name not in recipes:
                    continue
                args, fn, share = (params, tokens), loss, 0.0
                if name != "bfloat16":
                    fn = shd.quantized_matmuls(loss, name)
                    share = matmuls.report_products(fn, params, tokens).share
                if name.endswith("delayed"):
                    scaled = functools.partial(matmuls.scaled_params, fn)
                    args = jax.eval_shape(scaled, params, tokens), tokens
                args = jax.tree.map(lambda t: t.update(sharding=place), args)  # noqa: B023
                program = jax.jit(jax.value_and_grad(fn)).lower(*args).compile()
                yield program_row(target, model, name, program, share)


def program_row(target: str, model: str, name: str, program: Any, share: float) -> str:
    """Seconds are the bounds of products, at twice the rate where quantized, and of bytes."""
    audit = shd.audit(program)
    moved = sum(audit.nbytes.values())
    flops = sum(audit.flops.values())
    temporaries = program.memory_analysis().temp_size_in_bytes
    rate, bandwidth = {"h100x1": (989e12, 3.35e12), "v5e:1x1": (197e12, 0.819e12)}[target]
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


def wire_rows() -> Iterator[str]:
    """What a device of eight sends in a step of stage 3 of two layers."""
    mesh, tx = targets.mesh("h100x8", (8,), ("data",)), optax.sgd(1e-3)
    zero = shd.Zero(mesh, stage=3)
    loss, params, _ = large_decoder("7B", depth=2)
    state = zero.abstract_state(lambda: (zeros(params), tx.init(zeros(params))), tx=tx)
    tokens = jax.ShapeDtypeStruct((8, 257), jnp.int32)
    for recipe in (None, "fp8"):
        step = zero.train_step(loss, tx=tx, matmuls=recipe)
        sent = Counter[str]()
        for row in shd.audit(step.lower(state, tokens).compile()).traffic:
            sent[f"{row.op}, {row.dtype}"] += row.wire_bytes / 2**30
        each = "; ".join(f"{what} {gib:.2f}" for what, gib in sent.items() if gib > 0.01)
        yield f"| {recipe or 'bfloat16'} | {each} | {sum(sent.values()):.2f} |"


def zeros(types: Any) -> Any:
    """Arrays of some types."""
    return jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), types)


WIRE_HEADER = """\
| products | GiB sent, by collective | all |
|---|---|---|"""

# --- Learning -------------------------------------------------------------------------------------

CONTEXT, EACH = 64, 20  # bytes of a window; steps between batches that are drawn
# Of most interest first: a run that ends early has whole rows.
LEARNED = ("fp8", "int8", "ufp4", "sun4", "luq", "nvfp4", "mxfp8")
# Quantiles 0.975 of Student's t, by degrees of freedom.
T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def last_fifths(
    loss: Callable[..., jax.Array], task: SmallTask, seeds: int, steps: int, carries: bool = False
) -> list[float]:
    """Of each seed, the mean training loss of the last fifth; some losses carry scales."""
    tx = optax.adam(2e-3)
    if carries:
        tx = matmuls.scaled_optimizer(tx)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    train = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))
    found = []
    for seed in range(seeds):
        params = jax.tree.map(jnp.asarray, task.init(seed))
        if carries:
            params = matmuls.scaled_params(loss, params, task.batch(seed, 0))
        state, values = (params, tx.init(params)), []
        for start in range(0, steps, EACH):
            batches = [task.batch(seed, i) for i in range(start, min(start + EACH, steps))]
            state, losses = train(state, jax.tree.map(lambda *x: np.stack(x), *batches))
            values.extend(np.asarray(losses).tolist())
        found.append(float(np.mean(values[-max(steps // 5, 1) :])))
    return found


def learning_rows(seeds: int, steps: int, width: int, names: Sequence[str]) -> Iterator[str]:
    """A row for each task and recipe; of each task the plain loss first."""
    corpus = Corpus(_results.ROOT / "docs", CONTEXT)
    tasks = {"decoder": decoder(corpus, width), "ViT": vit(width), "MLP": mlp(2 * width)}
    plain = {name: last_fifths(task.loss, task, seeds, steps) for name, task in tasks.items()}
    for name, found in plain.items():
        yield f"| {name} | float32 | {np.mean(found):.4f} | | |"
    for recipe in names:
        for name, task in tasks.items():
            low = shd.quantized_matmuls(task.loss, recipe, min_size=0, simulate=True)
            carries = bool(matmuls.RECIPES[recipe].carried)
            found = last_fifths(low, task, seeds, steps, carries)
            above = 100 * (np.array(found) / np.array(plain[name]) - 1)
            spread = T.get(seeds - 1, np.nan) * above.std(ddof=1) / seeds**0.5 if seeds > 1 else 0
            yield (
                f"| {name} | {recipe} | {np.mean(found):.4f} | {above.mean():+.2f} ± {spread:.2f} "
                f"| {', '.join(f'{x:+.2f}' for x in above)} |"
            )


LEARNING_HEADER = """\
| task | recipe | loss | % above float32 | by seed |
|---|---|---|---|---|"""


def main() -> None:
    """Runs one part, and writes its section."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "part", choices=["programs", "wire", "learning"], nargs="?", default="learning"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=64, help="32 times the layers")
    parser.add_argument("--recipes", nargs="+", help="of all that a part has")
    parser.add_argument("--models", nargs="+", default=["7B"], choices=MODELS)
    parser.add_argument("--smoke", action="store_true", help="a little of it; prints only")
    args = parser.parse_args()
    if args.part == "programs":
        every = ("bfloat16", *sum(RECIPES.values(), ()))
        rows = program_rows(args.models, args.recipes or every)
        header, about = PROGRAM_HEADER, ABOUT_PROGRAMS
    elif args.part == "wire":
        rows, header, about = wire_rows(), WIRE_HEADER, ABOUT_WIRE
    else:
        steps, seeds = (4, 1) if args.smoke else (args.steps, args.seeds)
        width = 32 if args.smoke else args.width
        names = LEARNED[:1] if args.smoke else args.recipes or LEARNED
        rows, header = learning_rows(seeds, steps, width, names), LEARNING_HEADER
        about = ABOUT_LEARNING.format(steps=steps, seeds=seeds, width=width)
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
ABOUT_WIRE = """A step of stage 3 on 8 H100s, compiled: two layers of 7B's shapes, with embedding
and head, which are sent as they are. What a device sends in a step."""
ABOUT_LEARNING = """The mean training loss of the last fifth of {steps} steps, {seeds} seeds, each
recipe from the same start with the same batches; with the interval of 95 % of its mean difference.
A decoder of the bytes of docs/ and a ViT of rendered characters, both {width} wide with a layer
for 32 of that, and an MLP of twice the width. Products of all sizes are quantized but those of
attention and of the head. Recipes of 4 bits, and mxfp8, are simulated in float32."""


if __name__ == "__main__":
    main()
