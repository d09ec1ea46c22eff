"""Bytes of train state of each optimizer: on one device, under ZeRO, and in few bits.

GPT-2 small, and a 7B Llama with Flax's attention kernels. Nothing is allocated. The sizes are those
of the arguments of a compiled program that takes the train state as ZeRO places it, on 8 virtual
CPU devices: all arrays, with scales, counts and keys.

  python benchmarks/state_bytes.py            # prints the table, writes benchmarks/results/
  python benchmarks/state_bytes.py --smoke    # a tiny model, prints only
"""

import argparse
import sys

import _results
import jax
import jax.numpy as jnp
import optax

import optax_ext
import sharding as shd

sys.path.insert(0, str(_results.ROOT / "examples"))

from _model import CONFIGS, TransformerLM

DEVICES = 8
# The rule of factored optimizers whose row names one.
RULE = {"factoring": optax_ext.flax_transformer()}
OPTIMIZERS = {
    "optax.adamw": optax.adamw(1e-3),
    "optax.adamw, bf16 mu": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "optax.adafactor": optax.adafactor(1e-3),
    "optax_ext.came, flax_transformer()": optax_ext.came(1e-3, **RULE),
    "optax_ext.came, the same, bf16 mu": optax_ext.came(1e-3, mu_dtype=jnp.bfloat16, **RULE),
    "optax_ext.came, default rule": optax_ext.came(1e-3),
    "optax_ext.adafactor, flax_transformer()": optax_ext.adafactor(1e-3, **RULE),
    "optax_ext.adafactor, default rule": optax_ext.adafactor(1e-3),
}
# The formats, and the optimizers whose moments have them.
FORMATS = {"float32": None, **optax_ext.STATE_FORMATS}
STORED = {
    "optax.adamw": optax.adamw(1e-3),
    "optax.lion": optax.lion(1e-4),
    "optax.lamb": optax.lamb(1e-3),
    "optax_ext.came, flax_transformer()": optax_ext.came(1e-3, **RULE),
    "optax_ext.adafactor, the same, momentum": optax_ext.adafactor(1e-3, momentum=0.9, **RULE),
}
MIB = 2**20


def argument_bytes(mesh: jax.sharding.Mesh, stage: int, state: tuple, tx) -> int:
    """Bytes that one device holds of a train state: read from a compiled program."""
    zero = shd.Zero(mesh, stage=stage)
    placed = zero.shardings(state, tx=tx)
    program = jax.jit(lambda state: state, in_shardings=(placed,)).lower(state).compile()
    return program.memory_analysis().argument_size_in_bytes


def model(config: str) -> dict:
    """The abstract parameters of one of train_lm.py's models."""
    made = TransformerLM(CONFIGS[config])
    return jax.eval_shape(
        lambda key: made.init(key, jnp.zeros((1, 8), jnp.int32))["params"], jax.random.key(0)
    )


def llama(layers: int = 32, width: int = 4096, heads: int = 32, hidden: int = 11008) -> dict:
    """Abstract parameters in Llama's shape, attention kernels as Flax has them."""
    into, out = (width, heads, width // heads), (heads, width // heads, width)
    shapes = {name: {"kernel": into} for name in ("query", "key", "value")} | {
        "out": {"kernel": out},
        "gate": {"kernel": (width, hidden)},
        "up": {"kernel": (width, hidden)},
        "down": {"kernel": (hidden, width)},
        "attention_norm": {"scale": (width,)},
        "mlp_norm": {"scale": (width,)},
    }
    shapes = {f"block_{i}": shapes for i in range(layers)} | {
        "embed": {"embedding": (32000, width)},
        "unembed": {"kernel": (width, 32000)},
        "norm": {"scale": (width,)},
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def count(params: dict) -> int:
    """The number of parameters."""
    return sum(x.size for x in jax.tree.leaves(params))


def table(mesh: jax.sharding.Mesh, params: dict) -> str:
    """The bytes of optimizer state for a model, as a Markdown table."""
    lines = [
        f"| optimizer | state, MiB | bytes per parameter | per device, ZeRO 1-2 on {DEVICES}, MiB "
        "| bytes per parameter, if these are bfloat16 |",
        "|---|---|---|---|---|",
    ]
    num = count(params)
    narrow = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    for name, tx in OPTIMIZERS.items():
        state, of_narrow = ((p, jax.eval_shape(tx.init, p)) for p in (params, narrow))
        unsharded, sharded = (argument_bytes(mesh, s, state, tx) - 4 * num for s in (0, 2))
        in_16_bits = argument_bytes(mesh, 0, of_narrow, tx) - 2 * num
        lines.append(
            f"| `{name}` | {unsharded / MIB:.1f} | {unsharded / num:.2f} | {sharded / MIB:.1f} "
            f"| {in_16_bits / num:.3f} |"
        )
    return "\n".join(lines)


def formats_table(mesh: jax.sharding.Mesh, params: dict) -> str:
    """Bytes a parameter of optimizers by format, as a Markdown table."""
    lines = [f"| optimizer | {' | '.join(FORMATS)} |", "|---" * (len(FORMATS) + 1) + "|"]
    for name, inner in STORED.items():
        cells = []
        for bits in FORMATS.values():
            tx = inner if bits is None else optax_ext.low_precision_state(inner, bits)
            state = (params, jax.eval_shape(tx.init, params))
            size = argument_bytes(mesh, 0, state, tx) - 4 * count(params)
            cells.append(f"{size / count(params):.3f}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Prints the tables; writes those of the full model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model; writes no file")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh((DEVICES,), ("data",))
    name, params = ("smoke", model("smoke")) if smoke else ("gpt2-small", model("gpt2-small"))
    sizes = f"{name}: {count(params):,} float32 parameters ({4 * count(params) / MIB:.1f} MiB)"
    parts = [sizes, table(mesh, params)]
    models = {name: params}
    if not smoke:
        models["llama2-7b, Flax's attention kernels"] = llama()
    for name, params in models.items():
        parts += [
            f"Bytes a parameter of `low_precision_state`, scales included: {name}, "
            f"{count(params):,} float32 parameters",
            formats_table(mesh, params),
        ]
    text = "\n\n".join(parts)
    print(text)
    if not smoke:
        _results.write("state_bytes", "State bytes", "", text)


if __name__ == "__main__":
    main()
