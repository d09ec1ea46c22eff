"""Bytes of train state: what each optimizer keeps, alone and under ZeRO, for GPT-2 small.

Nothing is allocated. The sizes are those of the arguments of a compiled program that takes the
train state as ZeRO lays it, on 8 virtual CPU devices.

  python benchmarks/state_bytes.py            # prints the table, writes benchmarks/results/
  python benchmarks/state_bytes.py --smoke    # a tiny model, prints only
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax

import optax_ext
import sharding as shd

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from _model import CONFIGS, TransformerLM  # noqa: E402

DEVICES = 8
ATTENTION = {"factoring": optax_ext.flax_attention()}
OPTIMIZERS = {
    "optax.adamw": optax.adamw(1e-3),
    "optax.adamw, bf16 mu": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "optax.adafactor": optax.adafactor(1e-3),
    "optax_ext.came": optax_ext.came(1e-3, **ATTENTION),
    "optax_ext.came, bf16 mu": optax_ext.came(1e-3, mu_dtype=jnp.bfloat16, **ATTENTION),
    "optax_ext.adafactor": optax_ext.adafactor(1e-3, **ATTENTION),
}
MIB = 2**20


def argument_bytes(mesh: jax.sharding.Mesh, stage: int, state: tuple, tx) -> int:
    """Bytes that one device holds of a train state: read from a compiled program."""
    zero = shd.Zero(mesh, stage=stage)
    placed = zero.shardings(state, tx=tx)
    program = jax.jit(lambda state: state, in_shardings=(placed,)).lower(state).compile()
    return program.memory_analysis().argument_size_in_bytes


def table(config: str) -> str:
    """The sizes of one model as a Markdown table."""
    mesh = jax.make_mesh((DEVICES,), ("data",))
    model = TransformerLM(CONFIGS[config])

    def init(key: jax.Array) -> dict:
        return model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]

    params = jax.eval_shape(init, jax.random.key(0))
    num_params = sum(x.size for x in jax.tree.leaves(params))
    lines = [
        f"{config}: {num_params:,} float32 parameters ({4 * num_params / MIB:.1f} MiB)",
        "",
        f"| optimizer | state, MiB | bytes a parameter | a device's, ZeRO 1-2 on {DEVICES}, MiB |",
        "|---|---|---|---|",
    ]
    for name, tx in OPTIMIZERS.items():
        state = (params, jax.eval_shape(tx.init, params))
        alone, cut = (argument_bytes(mesh, stage, state, tx) - 4 * num_params for stage in (0, 2))
        lines.append(
            f"| `{name}` | {alone / MIB:.1f} | {alone / num_params:.2f} | {cut / MIB:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints the table, and keeps that of the whole model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model; writes no file")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    text = table("smoke" if smoke else "gpt2-small")
    print(text)
    if not smoke:
        path = ROOT / "benchmarks" / "results" / "state_bytes.md"
        path.parent.mkdir(exist_ok=True)
        how = f"`python benchmarks/state_bytes.py`, jax {jax.__version__}"
        path.write_text(f"# State bytes\n\n{how}\n\n{text}\n")


if __name__ == "__main__":
    main()
