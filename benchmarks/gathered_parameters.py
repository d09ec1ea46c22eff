"""Bytes of ZeRO 1 and 2 where updated parameters are gathered all at once, and group by group.

Read from programs for GPUs: of a step, and of its update and gather alone. Needs the compilers:
pip install 'optax-ext[aot]'.

  python benchmarks/gathered_parameters.py            # writes results/gathered_parameters.md
  python benchmarks/gathered_parameters.py --smoke    # the CPU and one layer, prints only
"""

import argparse
import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import optax

import sharding as shd
from sharding.placement import _layout
from sharding.plan import MODELS

# Model, its layers, target, stage.
ROWS = [
    ("llama2-7b", 32, "h100x8", 2),
    ("llama2-7b", 32, "h100x8", 1),
    ("gpt2-small", 12, "h100x8", 2),
    ("llama2-7b", 32, "h200x8", 2),
]
TX = optax.adamw(1e-3)
MIB = 2**20


def programs(name: str, layers: int, target: str, stage: int) -> Iterator[jax.stages.Lowered]:
    """A step on one sequence of 1,024 tokens a device, and its update alone."""
    model = dataclasses.replace(MODELS[name], layers=layers, length=1024)
    devices = shd.targets.parse(target).num_devices
    zero = shd.Zero(shd.targets.mesh(target, (devices,), ("data",)), stage=stage)

    def make() -> tuple[Any, Any]:
        params = model.init(jnp.bfloat16)
        return params, TX.init(params)

    state = zero.abstract_state(make, tx=TX)
    loss = model.make_loss(jax.checkpoint(zero.gathered(model.apply_layer)))
    tokens = jax.ShapeDtypeStruct((devices, 1025), jnp.int32)
    yield zero.train_step(loss, tx=TX).lower(state, tokens)

    def update(state: Any, grads: Any) -> Any:
        return zero.apply_gradients(state, grads, tx=TX)

    places = zero.shardings(jax.eval_shape(make), tx=TX)
    yield jax.jit(update, donate_argnums=0, out_shardings=places).lower(state, state[1][0].mu)


def rows(cases: list[tuple[str, int, str, int]]) -> Iterator[str]:
    """Bytes of one device in MiB, at once and by group; CPU seconds of compiling the step."""
    for case in cases:
        cells: list[str] = []
        for at_once in (True, False):
            groups = mock.patch.object(_layout, "GATHER_SHARD_BYTES", 2**50)
            with groups if at_once else contextlib.nullcontext():
                lowered, update = programs(*case)
            begin = time.process_time()
            step = lowered.compile()
            seconds = time.process_time() - begin
            memory, alone = (p.memory_analysis() for p in (step, update.compile()))
            gathers = [t.wire_bytes for t in shd.audit(step).traffic if t.op == "all-gather"]
            state = memory.argument_size_in_bytes / MIB
            held, sent = memory.temp_size_in_bytes / MIB, sum(gathers) / MIB
            cells += [f"{state:.0f} + {held:.0f}", f"{alone.temp_size_in_bytes / MIB:.0f}"]
            cells += [f"{sent:.0f}", f"{seconds:.0f}"]
        name, layers, target, stage = case
        yield f"| {name}, {layers} layers | {target} | {stage} | {' | '.join(cells)} |"


def main() -> None:
    """Prints the table; writes that of full size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one layer, the CPU alone; no file")
    smoke = parser.parse_args().smoke
    if smoke:
        jax.config.update("jax_num_cpu_devices", 8)
    columns = " | ".join(
        f"{how}: arguments + temporaries | of the update alone | gathered | compiled in CPU s"
        for how in ("at once", "by group")
    )
    header = f"| model | target | stage | {columns} |\n|---|---|---|{'---|' * 8}"
    table = _results.table(header, rows([("gpt2-small", 1, "cpu:8", 2)] if smoke else ROWS))
    if not smoke:
        about = (
            "MiB of one device: AdamW, bfloat16 parameters, a sequence of 1,024 tokens a device. "
            "Temporaries of the update alone are new shards and what is gathered."
        )
        title = "ZeRO 1 and 2: parameters gathered at once and by group"
        _results.write("gathered_parameters", title, about, table)


if __name__ == "__main__":
    main()
