"""What QLoRA holds: Llama 2 in NF4, with adapters of rank 16, in programs for GPUs.

The loss is that of plain jit, with jax.checkpoint around a layer, whose input may be stored in host
memory. Nothing is run. Needs the compilers: pip install '.[aot]'.

  python benchmarks/fine_tuning_memory.py           # writes results/fine_tuning_memory.md
  python benchmarks/fine_tuning_memory.py --smoke   # the CPU and two small layers, prints only
"""

import argparse
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import optax
from _steps import zero_on

import sharding as shd
from sharding import stored
from sharding.plan import MODELS, Decoder

GIB = 2**30
MATRICES = "layers/(query|key|value|out|gate|up|down)$"
FORMS = {MATRICES: (stored.frozen(4), stored.lora(16))}
# Model, tokens, tiles, target, ZeRO stage, what is in host memory: stacks of layers, their inputs.
CASES = [
    ("llama2-7b", 1024, 1, "h100x1", 0, ""),
    ("llama2-13b", 1024, 1, "h100x1", 0, ""),
    ("llama2-70b", 1024, 1, "h100x1", 0, ""),
    ("llama2-70b", 1024, 1, "h100x8", 3, ""),
    ("llama2-70b", 1024, 1, "v5e:1x1", 0, "stacks"),
    ("llama2-7b", 8192, 1, "h100x1", 0, ""),
    ("llama2-7b", 8192, 16, "h100x1", 0, ""),
    ("llama2-7b", 8192, 16, "h100x1", 0, "inputs"),
    ("llama2-70b", 8192, 32, "h100x1", 0, ""),
    ("llama2-70b", 8192, 32, "h100x1", 0, "inputs"),
]
COLUMNS = (
    *("model", "tokens", "tiles", "target", "stage", "in host memory"),
    *("GiB: parameters", "state", "temporaries", "total", "on host", "TFLOP", "sent"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"

# What jax.checkpoint stores of a layer: its input, by the name that the decoder gives it.
INPUT_ON_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["decoder_layer_input"],
    offload_src="device",
    offload_dst="pinned_host",
)


def row(model: Decoder, name: str, tiles: int, target: str, stage: int, on_host: str) -> str:
    """The figures of one device, with one sequence."""
    offload = "all" if on_host == "stacks" else None
    zero = zero_on(target, stage=stage, offload=offload)
    tx = optax.masked(optax.adamw(1e-4), stored.trained)

    def make_state() -> tuple[Any, Any]:
        params = stored.store(model.init(jnp.bfloat16), FORMS, jax.random.key(0))
        return params, tx.init(params)

    policy = INPUT_ON_HOST if on_host == "inputs" else None
    # A loop keeps what runs again apart from its first run without barriers.
    plain = model.make_loss(jax.checkpoint(model.apply_layer, policy=policy, prevent_cse=False))
    loss = stored.loss_of(shd.tiled(plain, tiles) if tiles > 1 else plain)
    step = zero.train_step(loss, tx=tx, trainable=stored.trained)
    state = zero.abstract_state(make_state, tx=tx)
    found = shd.audit(step.lower(state, model.batch(zero.num_devices)).compile(), mesh=zero.mesh)
    sizes = found.arguments["parameters"], found.arguments["optimizer state"]
    sizes = *sizes, found.temporaries or 0.0, found.memory, found.host
    figures = [f"{x / GIB:.2f}" for x in sizes]
    figures += [f"{sum(found.flops.values()) / 1e12:.1f}", f"{found.wire_bytes / GIB:.1f}"]
    asked = f"{name} | {model.length:,} | {tiles} | {target} | {stage} | {on_host or '-'}"
    return f"| {asked} | {' | '.join(figures)} |"


def rows(smoke: bool) -> Iterator[str]:
    """A row of each model."""
    if smoke:
        yield row(Decoder(2, 64, 4, 4, 128, 96, 32), "tiny", 1, "cpu:1", 0, "")
        return
    for name, length, *case in CASES:
        yield row(dataclasses.replace(MODELS[name], length=length), name, *case)


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    table = _results.table(HEADER, rows(smoke))
    if not smoke:
        about = (
            "Llama 2, all matrices of its layers in NF4 with scales in 8 bits and adapters of rank "
            "16 in bfloat16, AdamW, one sequence a device, every layer computed again. With "
            "several tiles the loss is `shd.tiled`. GiB of one device, and those that it sends in "
            "a step. In host memory are stacks of layers, streamed "
            '(`offload="all"`), or inputs of layers (a policy of `jax.checkpoint`), which '
            "cross once each way in a step. With barriers in the checkpoints (`prevent_cse`) the "
            "row at stage 3 holds less: 8.00."
        )
        _results.write("fine_tuning_memory", "What QLoRA holds", about, table)


if __name__ == "__main__":
    main()
