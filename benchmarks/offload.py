"""What keeping optimizer state in the host's memory leaves on a device: compiled for TPUs.

Whole training steps, AdamW with float32 master weights and bfloat16 parameters, ZeRO stage 2: the
state on the device, on the host and brought whole to the device in each step, and streamed
(``Zero(offload="optimizer")``). Sizes are what the compiler reports for one device. TPU targets
need libtpu: pip install 'optax-ext[aot]'. Nothing is run.

  python benchmarks/offload.py            # prints the table, writes benchmarks/results/
  python benchmarks/offload.py --smoke    # on 8 virtual CPU devices: that it compiles
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import optax_ext
import sharding as shd
from sharding.plan import MODELS, targets

ROOT = pathlib.Path(__file__).resolve().parents[1]
MIB = 2**20
LENGTH = 512
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax_ext.master_weights(optax.adamw(1e-3)),
    "adamw, 8 bits": lambda: optax_ext.master_weights(optax_ext.adamw8bit(1e-3)),
    "came": lambda: optax_ext.master_weights(optax_ext.came(1e-3)),
}
HEADER = """\
| model | layers | target | optimizer | state | arguments | temporaries | device: both |\
 host: arguments | host: temporaries |
|---|---|---|---|---|---|---|---|---|---|"""


def rows(name: str, stacked: bool, target: str, optimizer: str) -> Iterator[str]:
    """Lines of the table: one step with its state in three places."""
    model = dataclasses.replace(MODELS[name], length=LENGTH, scan=stacked)
    tx = OPTIMIZERS[optimizer]()
    axes = targets.parse(target).mesh_axes
    mesh = targets.mesh(target, tuple(axes.values()), tuple(axes))
    loss_fn = model.make_loss(jax.checkpoint(model.apply_layer))
    dtype = jnp.float32 if target.startswith("cpu") else jnp.bfloat16  # XLA:CPU widens sums

    def make_state() -> Any:
        params = model.init(dtype)
        return params, tx.init(params)

    on_device = shd.Zero(mesh, 2, tuple(axes))
    streamed = dataclasses.replace(on_device, offload="optimizer")
    batch = jax.ShapeDtypeStruct((on_device.num_devices, LENGTH + 1), jnp.int32)

    def whole(state: Any, batch: Any) -> Any:
        params, opt_state = state
        _, grads = on_device.value_and_grad(loss_fn)(params, batch)
        opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
        return on_device.apply_gradients((params, opt_state), grads, tx=tx)

    for where, zero in {"device": on_device, "whole": streamed, "streamed": streamed}.items():
        state = zero.abstract_state(make_state, tx=tx)
        if where == "whole":
            out = jax.tree.map(lambda x: x.sharding, state)
            step: Any = jax.jit(whole, donate_argnums=0, out_shardings=out)
        else:
            step = zero.train_step(loss_fn, tx=tx)
        memory = step.lower(state, batch).compile().memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        sizes = [
            arguments,
            temporaries,
            arguments + temporaries,
            memory.host_argument_size_in_bytes,
            memory.host_temp_size_in_bytes,
        ]
        yield (
            f"| {name} | {'stacked' if stacked else 'apart'} | {target} | {optimizer} | {where} | "
            + " | ".join(f"{size / MIB:,.0f}" for size in sizes)
            + " |"
        )


def main() -> None:
    """Prints the table; keeps that of the TPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="gpt2-small on cpu:8; no file")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_num_cpu_devices", 8)
    cases = [("gpt2-small", "v5e:2x4"), ("llama2-7b", "v5e:4x8")]
    lines = [HEADER]
    print(HEADER)
    for name, target in [("gpt2-small", "cpu:8")] if smoke else cases:
        for stacked in [True] if smoke else [True, False]:
            for optimizer in ["came"] if smoke else OPTIMIZERS:
                for line in rows(name, stacked, target, optimizer):
                    lines.append(line)
                    print(line, flush=True)
    if not smoke:
        how = (
            f"`python benchmarks/offload.py`, {datetime.date.today()}, jax {jax.__version__}, "
            f"libtpu {importlib.metadata.version('libtpu')}; MiB of one device, sequences of "
            f"{LENGTH} tokens, one a device, bfloat16 parameters, float32 master weights, ZeRO "
            "stage 2. `device`: no offload. `whole`: the state is brought to the device whole. "
            '`streamed`: `Zero(offload="optimizer")`.'
        )
        path = ROOT / "benchmarks" / "results" / "offload.md"
        path.write_text("\n".join(["# Optimizer state on the host", "", how, "", *lines, ""]))


if __name__ == "__main__":
    main()
