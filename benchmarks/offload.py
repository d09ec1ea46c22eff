"""Device memory with optimizer state in host memory, read from programs for TPUs.

The update alone (``Zero.apply_gradients``: gradients are arguments), ZeRO stage 3, bfloat16
parameters and float32 master weights: the state on the device, in host memory and loaded at once,
and streamed (``Zero(offload="optimizer")``). Sizes are what the compiler reports for one
device. TPU targets need libtpu: pip install '.[aot]'. Nothing is run.

  python benchmarks/offload.py            # prints the table, writes benchmarks/results/
  python benchmarks/offload.py --smoke    # gpt2-small on 8 virtual CPU devices, prints only
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

import optax_ext
import sharding as shd
from sharding.plan import MODELS

MIB = 2**20
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax_ext.master_weights(optax.adamw(1e-3)),
    "came": lambda: optax_ext.master_weights(optax_ext.came(1e-3)),
    "adamw, 8 bits": lambda: optax_ext.master_weights(optax_ext.adamw8bit(1e-3)),
}
CASES = [  # the last model has unstacked layers
    *(("llama2-7b", "v5e:4x8", name, True) for name in OPTIMIZERS),
    ("llama2-7b", "v5e:4x8", "adamw", False),
]
HEADER = """\
| model | layers | target | optimizer | state | arguments | temporaries | device: both |\
 host: arguments | host: temporaries |
|---|---|---|---|---|---|---|---|---|---|"""


def rows(name: str, target: str, optimizer: str, stacked: bool) -> Iterator[str]:
    """Lines of the table: one update with three placements of its state."""
    model = dataclasses.replace(MODELS[name], scan=stacked)
    tx = OPTIMIZERS[optimizer]()
    on_device = zero_on(target, stage=3)
    on_host = dataclasses.replace(on_device, offload="optimizer")

    def make_state() -> Any:
        params = model.init(jnp.bfloat16)
        return params, tx.init(params)

    for where, zero in {
        "device": on_device,
        "loaded at once": on_host,
        "streamed": on_host,
    }.items():
        state = zero.abstract_state(make_state, tx=tx)

        def update(state: Any, grads: Any, where: str = where, zero: shd.Zero = zero) -> Any:
            if where == "loaded at once":
                state = (state[0], jax.device_put(state[1], jax.memory.Space.Device))
                zero = on_device
            return zero.apply_gradients(state, grads, tx=tx)

        out = jax.tree.map(lambda x: x.sharding, state)
        step = jax.jit(update, donate_argnums=0, out_shardings=out)
        # Gradients are sharded as parameters.
        memory = step.lower(state, state[0]).compile().memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        sizes = [
            arguments,
            temporaries,
            arguments + temporaries,
            memory.host_argument_size_in_bytes,
            memory.host_temp_size_in_bytes,
        ]
        yield (
            f"| {name} | {'stacked' if stacked else 'unstacked'} | {target} | {optimizer} "
            f"| {where} | " + " | ".join(f"{size / MIB:,.0f}" for size in sizes) + " |"
        )


def main() -> None:
    """Prints the table; writes that of the TPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="gpt2-small on cpu:8; no file")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_num_cpu_devices", 8)
    cases = [("gpt2-small", "cpu:8", "came", True)] if smoke else CASES
    table = _results.table(HEADER, (line for case in cases for line in rows(*case)))
    if not smoke:
        about = (
            "MiB of one device, ZeRO stage 3, "
            "bfloat16 parameters and gradients, float32 master weights. Arguments are parameters, "
            "gradients and the state on the device. `device`: no offload. `loaded at once`: the "
            "state is in host memory, and the step loads all of it. `streamed`: "
            '`Zero(offload="optimizer")`. Host temporaries are second copies of arrays that the '
            "compiler lays out anew."
        )
        _results.write("offload", "Optimizer state in host memory", about, table)


if __name__ == "__main__":
    main()
