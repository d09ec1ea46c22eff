"""What tiles save: heads, an MLP of a long sequence and a step, in programs for GPUs and TPUs.

The loss is that of plain jit. Nothing is run. Needs the compilers: pip install '.[aot]'.

  python benchmarks/tiles.py           # writes results/tiles.md; an hour
  python benchmarks/tiles.py --smoke   # the CPU and small arrays, prints only
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import optax
from _steps import zero_on
from jax.sharding import NamedSharding, PartitionSpec

import sharding as shd
from sharding.plan import MODELS, Decoder
from sharding.plan.cost._parallel_plan import short

GIB = 2**30
HEADER = """
| program | target | form | GiB: temporaries | total | TFLOP | GiB moved |
|---|---|---|---|---|---|---|
""".strip()


def head(params: Any, batch: Any) -> jax.Array:
    """The loss of a head, from what it reads."""
    logits = (batch["x"] @ params["w"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def head_of_one_call(params: Any, batch: Any) -> jax.Array:
    """The same by ``cross_entropy``."""
    return shd.cross_entropy(batch["x"], params["w"], batch["labels"])


def mlp(params: Any, batch: Any) -> jax.Array:
    """A gated MLP beside its input, and a sum of squares."""
    x = batch["x"]
    hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
    return jnp.mean((x + hidden @ params["down"]).astype(jnp.float32) ** 2)


def figures(compiled: Any, mesh: Any) -> str:
    """Of one device."""
    found = shd.audit(compiled, mesh=mesh)
    sizes = [(found.temporaries or 0.0) / GIB, found.memory / GIB]
    work = [sum(found.flops.values()) / 1e12, sum(found.nbytes.values()) / GIB]
    return f"{sizes[0]:.2f} | {sizes[1]:.2f} | {work[0]:.1f} | {work[1]:.0f}"


def gradient(loss: Callable[..., Any], arrays: Any, target: str) -> str:
    """The figures of a loss and its gradients by parameters and input."""
    mesh = shd.targets.mesh(target, (1,), ("data",))
    place = NamedSharding(mesh, PartitionSpec())
    params, x, labels = jax.tree.map(lambda x: x.update(sharding=place), arrays)

    def both(params: Any, x: Any, labels: Any) -> Any:
        of = lambda params, x: loss(params, {"x": x, "labels": labels})  # noqa: E731
        return jax.value_and_grad(of, (0, 1))(params, x)

    return figures(jax.jit(both).lower(params, x, labels).compile(), mesh)


def arrays_of(shapes: dict[str, Any], tokens: int, width: int) -> Any:
    """Types of parameters, an input in bfloat16, and labels."""
    params = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in shapes.items()}
    x = jax.ShapeDtypeStruct((1, tokens, width), jnp.bfloat16)
    return params, x, jax.ShapeDtypeStruct((1, tokens), jnp.int32)


def forms(loss: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The loss as it is, and in tiles."""
    return {
        "plain": loss,
        "tiled, gradient in the forward pass": shd.tiled(loss, 16, forward_gradient=True),
        "tiled, computed again": shd.tiled(loss, 16, forward_gradient=False),
    }


def step(model: Decoder, target: str, form: str) -> str:
    """A step of ZeRO 2, every layer computed again, a sequence a device."""
    zero = zero_on(target, stage=2)
    tx = optax.adamw(1e-3)

    def make_state() -> tuple[Any, Any]:
        params = model.init(jnp.bfloat16)
        return params, tx.init(params)

    loss: Any = model.make_loss(jax.checkpoint(model.apply_layer))
    if "cross_entropy" in form:
        loss = with_own_head(model)
    if "tiled" in form:
        loss = shd.tiled(loss, 8)
    state = zero.abstract_state(make_state, tx=tx)
    update = "backward" if "backward" in form else "after"
    made = zero.train_step(loss, tx=tx, update=update)
    lowered = made.lower(state, model.batch(zero.num_devices))
    return figures(lowered.compile(), zero.mesh)


LONGEST = """
| tiles | tokens of a sequence | plan of the longest that fits | GiB: planned | compiled |
|---|---|---|---|---|
""".strip()


ABOUT_LONGEST = """Llama 3 8B in bfloat16 on one H100, Adafactor, each layer updated in the backward
pass, one sequence: lengths are doubled until `fit(largest=True)` finds no step."""


def longest(model: Decoder, target: str, tiles: Any, memory: float | None, tries: int) -> str:
    """The most tokens of a sequence, doubled, of which ``fit`` finds a step; and its plan."""
    keep = {"update_in_backward": True, "recompute": "full", "offload": False} | tiles
    tx = optax.adafactor(1e-3)
    figures = "none fits | | |"
    for _ in range(tries):
        loss = model.make_loss(model.apply_layer)

        def make_state(model: Decoder = model) -> tuple[Any, Any]:
            params = model.init(jnp.bfloat16)
            return params, tx.init(params)

        given: Any = {"tx": tx, "target": target, "keep": keep, "memory": memory, "largest": True}
        try:
            found = shd.plan.fit(loss, make_state, model.batch(1), **given)
        except shd.plan.NoPlanFits:
            return figures
        words = found.proofs[0]
        sizes = f"{words.planned / GIB:.1f} | {words.memory / GIB:.1f} |"
        figures = f"{model.length * found.plan.sequences:,} | {short(words.plan)} | {sizes}"
        print(figures, flush=True)
        model = dataclasses.replace(model, length=2 * model.length)
    return figures


def longest_rows(smoke: bool) -> Iterator[str]:
    """Rows of the longest sequence, without and with tiles."""
    model, target, memory, tries = MODELS["llama3-8b"], "h100x1", None, 8
    lengths = {"none": 16384, "any": 65536}  # half of these fits, too
    if smoke:
        model, target, memory, tries = Decoder(2, 64, 4, 4, 128, 96, 32), "cpu:1", 2**21, 1
        lengths = {"none": 32}
    for name, length in lengths.items():
        own = dataclasses.replace(model, length=length)
        tiles = {"tiles": 1} if name == "none" else {}
        yield f"| {name} | {longest(own, target, tiles, memory, tries)}"


def with_own_head(model: Decoder) -> Callable[..., Any]:
    """The loss of a model whose head is ``cross_entropy``."""
    layer = jax.checkpoint(model.apply_layer)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = model.embed(params, tokens)
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["layers"])
        x = model._norm(params["norm"], x)
        w, dim = (params["embed"], 0) if model.tied else (params["unembed"], 1)
        return shd.cross_entropy(x, w, tokens[:, 1:], vocab_dim=dim)

    return loss


def rows(smoke: bool) -> Iterator[str]:
    """A row of each program."""
    width, words, hidden, tokens, long = 4096, 128256, 14336, 8192, 131072
    targets, of_steps = ("h100x1", "v5e:1x1"), ("h100x8",)
    model = dataclasses.replace(MODELS["gpt2-small"], length=512)
    if smoke:
        width, words, hidden, tokens, long = 8, 64, 32, 32, 64
        targets, of_steps = ("cpu:1",), ("cpu:8",)
        model = Decoder(2, 64, 4, 4, 128, 96, 32)
    of_head = arrays_of({"w": (width, words)}, tokens, width)
    matrices = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    of_mlp = arrays_of(matrices, long, width)
    for target in targets:
        for name, loss in {**forms(head), "cross_entropy": head_of_one_call}.items():
            text = gradient(loss, of_head, target)
            yield f"| head, {tokens:,} tokens | {target} | {name} | {text} |"
        for name, loss in forms(mlp).items():
            text = gradient(loss, of_mlp, target)
            yield f"| MLP, {long:,} tokens | {target} | {name} | {text} |"
    for target in of_steps:
        heads = ("plain", "8 tiled", "cross_entropy", "cross_entropy, 8 tiled")
        for name in (*heads, "cross_entropy, update in the backward pass"):
            yield f"| GPT-2 small, ZeRO 2 | {target} | {name} | {step(model, target, name)} |"


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_num_cpu_devices", 8)  # of --smoke
    table = _results.table(HEADER, rows(smoke))
    of_lengths = _results.table(LONGEST, longest_rows(smoke))
    if not smoke:
        about = (
            "The head of Llama 3 8B and the MLP of one of its layers, in bfloat16, with their "
            "gradients by parameters and input; 16 tiles. A step of GPT-2 small in bfloat16, "
            "AdamW, a sequence of 512 tokens a device, every layer computed again. Of one device."
        )
        sections = table, f"## Longest sequence\n\n{ABOUT_LONGEST}\n\n{of_lengths}"
        _results.write("tiles", "What tiles save", about, *sections)


if __name__ == "__main__":
    main()
