"""The bytes that optimizers' steps move, hold and send, read from programs for TPUs and GPUs.

Bytes accessed and temporaries of a step on one chip; kernels that a GPU launches; and the all-
reduces of a step under ZeRO, for which it waits. Needs the compilers: pip install '.[aot]'.

  python benchmarks/step_bytes.py            # writes benchmarks/results/step_bytes.md
  python benchmarks/step_bytes.py --smoke    # one small matrix for the CPU, prints only
"""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import optax
from _steps import Shapes, compiled, cost, step_of

import optax_ext
import sharding as shd

# Matrices of a 7B Llama and of GPT-2 small, and their shards on 8 and 64 devices.
SHAPES: dict[str, Shapes] = {
    "7B: 4096 x 4096": [(4096, 4096)],
    "7B: 4096 x 11008": [(4096, 11008)],
    "7B: 32000 x 4096": [(32000, 4096)],
    "GPT-2: 768 x 3072": [(768, 3072)],
    "GPT-2: 50257 x 768": [(50257, 768)],
    "1/8: 512 x 4096": [(512, 4096)],
    "1/8: 4096 x 1376": [(4096, 1376)],
    "1/64: 4096 x 172": [(4096, 172)],
    "1/64: 500 x 4096": [(500, 4096)],
}
_16 = jnp.bfloat16
# Each with the dtype of its gradients; those in 16 bits keep their momentum in 16 bits too.
OPTIMIZERS = {
    "optax.adamw": (optax.adamw(1e-3), jnp.float32),
    "came": (optax_ext.came(1e-3), jnp.float32),
    "adafactor, no scale": (
        optax_ext.adafactor(1e-3, multiply_by_parameter_scale=False),
        jnp.float32,
    ),
    "adafactor": (optax_ext.adafactor(1e-3), jnp.float32),
    "adafactor, momentum": (optax_ext.adafactor(1e-3, momentum=0.9), jnp.float32),
    "optax.adamw, 16 bits": (optax.adamw(1e-3, mu_dtype=_16), _16),
    "came, 16 bits": (optax_ext.came(1e-3, mu_dtype=_16), _16),
    "optax.adamw, 8-bit state": (optax_ext.low_precision_state(optax.adamw(1e-3)), jnp.float32),
    "came, 8-bit state": (optax_ext.low_precision_state(optax_ext.came(1e-3)), jnp.float32),
}


def bytes_table(target: str, shapes: dict[str, Shapes] = SHAPES) -> str:
    """A row for each matrix, a column for each optimizer: bytes accessed (temporaries)."""

    def row(name: str) -> str:
        cells = []
        for tx, dtype in OPTIMIZERS.values():
            moved, held = cost(compiled(target, tx, shapes[name], dtype), shapes[name])
            cells.append(f"{moved:.1f} ({held:.2f})")
        return f"| {name} | {' | '.join(cells)} |"

    header = f"| matrix | {' | '.join(OPTIMIZERS)} |\n|---|{'---|' * len(OPTIMIZERS)}"
    return _results.table(header, (row(name) for name in shapes))


def kernels(program: Any) -> int:
    """How many kernels a program launches: instructions of its entry that are not views."""
    entry = program.as_text().split("ENTRY ", 1)[1].split("\n}", 1)[0]
    return len(re.findall(r" (?:fusion|copy|reduce|custom-call|sort)\(", entry))


def layers(count: int) -> dict[str, tuple[int, ...]]:
    """A transformer's arrays, most of them small vectors."""
    block = {
        **dict.fromkeys(("query", "key", "value", "out"), (1024, 1024)),
        "up": (1024, 4096),
        "down": (4096, 1024),
        **dict.fromkeys(("norm", "scale", "out_bias", "down_bias"), (1024,)),
        "up_bias": (4096,),
    }
    shapes = {f"{name}_{i}": shape for i in range(count) for name, shape in block.items()}
    return {"embed": (8192, 1024), **shapes}


def kernel_table(target: str, num_layers: int) -> str:
    """Kernels of a step of one GPU."""
    shapes = list(layers(num_layers).values())

    def rows():
        for name, (tx, dtype) in OPTIMIZERS.items():
            program = compiled(target, tx, shapes, dtype)
            moved, held = cost(program, shapes)
            yield f"| {name} | {kernels(program)} | {moved:.1f} | {held:.2f} |"

    return _results.table(
        f"| step of {len(shapes)} arrays | kernels | bytes per parameter | temporaries |\n"
        "|---|---|---|---|",
        rows(),
    )


def reductions(target: str, tx: optax.GradientTransformation, num_layers: int) -> tuple[int, float]:
    """All-reduces of an update of sharded parameters, and the bytes that one device sends."""
    devices = shd.targets.parse(target).num_devices
    mesh = shd.targets.mesh(target, (devices,), ("data",))
    # Below stage 3 the same update is followed by a gather of the parameters.
    zero = shd.Zero(mesh, stage=3)
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in layers(num_layers).items()}
    momentum = optax.trace(0.9)
    state = (params, jax.eval_shape(tx.init, params))
    placed = zero.shardings(state, tx=tx)
    grads = zero.shardings((params, jax.eval_shape(momentum.init, params)), tx=momentum)[1].trace

    def on(tree: Any, places: Any) -> Any:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, places
        )

    def step(state: tuple, grads: dict) -> tuple:
        return step_of(tx)(*state, grads)

    program = (
        jax.jit(step, donate_argnums=0, out_shardings=placed)
        .lower(on(state, placed), on(params, grads))
        .compile()
    )
    found = [t for t in shd.audit(program).traffic if t.op == "all-reduce"]
    return sum(t.count for t in found), sum(t.wire_bytes for t in found)


def reduction_table(targets: Sequence[str], num_layers: int) -> str:
    """Counts, and how many hops a ring makes for them one after another."""

    def rows():
        for target in targets:
            devices = shd.targets.parse(target).num_devices
            for name in ("optax.adamw", "came", "adafactor, no scale", "adafactor"):
                count, sent = reductions(target, OPTIMIZERS[name][0], num_layers)
                hops = count * 2 * (devices - 1)
                yield f"| {target} | {name} | {count} | {sent / 1024:.1f} | {hops} |"

    return _results.table(
        f"| target | update of {len(layers(num_layers))} sharded arrays | all-reduces "
        "| KiB sent | hops in a ring, one after another |\n|---|---|---|---|---|",
        rows(),
    )


def main() -> None:
    """Prints the tables; writes those of full size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small, the CPU alone; no file")
    if parser.parse_args().smoke:
        bytes_table("cpu:1", {"small": [(64, 256)]})
        return
    parts = []
    for target in ("v5e:1x1", "v6e:1x1", "h200x1"):
        parts += [f"Bytes a parameter on {target} (temporaries)", bytes_table(target)]
    parts += ["Kernels on h200x1", kernel_table("h200x1", 8)]
    parts += [
        "All-reduces of an update under ZeRO stage 3",
        reduction_table(["v5e:8x8", "v5e:16x16", "h200x64"], 4),
    ]
    _results.write("step_bytes", "Optimizer steps: bytes moved, held and sent", "", *parts)


if __name__ == "__main__":
    main()
