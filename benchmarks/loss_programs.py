"""How a loss runs: what its proof costs in first calls, and what each program costs in steps.

Four models at stages 2 and 3 on 8 virtual devices: by default, where a proof chooses the program,
and with ``per_device`` True and False; beside plain ``jit`` with the parameters and the optimizer
state sharded, which leaves all to the partitioner. Steps take turns.

  python benchmarks/loss_programs.py           # writes benchmarks/results/loss_programs.md
  python benchmarks/loss_programs.py --smoke   # one tiny model at one stage, prints only
"""

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _steps import jitted_step, quartiles, time_alternately
from _transformer import Config, init, make_loss

import sharding as shd

TX = optax.adamw(1e-3)
DEVICES = 8
BASE = "jit"
PROGRAMS = {"default": None, "per device": True, "partitioned": False}
Loss = Callable[[Any, Any], jax.Array]


def decoder(scan: bool, smoke: bool) -> tuple[Callable[[], Any], Loss, Any]:
    """A language model, whose loss is a mean."""
    config = Config(layers=2 if smoke else 8, width=64 if smoke else 256, scan=scan)
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (2 * DEVICES, 65))
    return functools.partial(init, config), make_loss(), tokens


def towers(coupled: bool, smoke: bool) -> tuple[Callable[[], Any], Loss, Any]:
    """A stack of layers; a contrastive loss of its outputs, or a mean over rows that count."""
    width = 64 if smoke else 256
    rng = np.random.default_rng(0)

    def make() -> Any:
        shape = (2 if smoke else 8, width, 4 * width)
        up = jnp.asarray(rng.normal(size=shape) / width**0.5, jnp.float32)
        return {"up": up, "down": jnp.swapaxes(up, 1, 2) / 4}

    def outputs(params: Any, x: jax.Array) -> jax.Array:
        layer = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None)  # noqa: E731
        return jax.lax.scan(layer, x, params)[0]

    def contrastive(params: Any, batch: Any) -> jax.Array:
        z = outputs(params, batch["x"])
        labels = jnp.arange(len(z))
        logits = z @ batch["y"].T / width
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def masked(params: Any, batch: Any) -> jax.Array:
        losses = jnp.mean((outputs(params, batch["x"]) - batch["y"]) ** 2, axis=-1)
        return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])

    n = 16 * DEVICES
    batch = {k: rng.normal(size=(n, width)).astype(np.float32) for k in "xy"}
    return make, contrastive if coupled else masked, batch | {"mask": np.arange(n) % 3 > 0}


MODELS = {
    "decoder, scanned": functools.partial(decoder, True),
    "decoder, unrolled": functools.partial(decoder, False),
    "masked mean": functools.partial(towers, False),
    "contrastive": functools.partial(towers, True),
}


def rows(name: str, stage: int, rounds: int, smoke: bool) -> Iterator[str]:
    """A row for each step of a model at a stage."""
    make, loss, batch = MODELS[name](smoke)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    zero = shd.Zero(mesh, stage=stage)
    placed, first, calls, hows = zero.put(batch), {}, {}, {}

    def make_state() -> Any:
        params = make()
        return params, TX.init(params)

    for program in (BASE, *PROGRAMS):
        held = [zero.init(make_state, tx=TX)]
        if program == BASE:
            step: Any = jitted_step(loss, TX, held[0])
        else:
            new = functools.partial(zero.train_step, shd.Loss(loss, per_device=PROGRAMS[program]))
            hows[program] = str(new(tx=TX).loss_program(jax.eval_shape(make_state), batch))
            step = new(tx=TX)
        jax.clear_caches()
        start = time.process_time()
        held[0], _ = step(held[0], placed)
        jax.block_until_ready(held)
        first[program] = time.process_time() - start

        def call(step: Any = step, held: list[Any] = held) -> None:
            held[0], metrics = step(held[0], placed)
            jax.block_until_ready((held, metrics))

        calls[program] = call
    times = time_alternately(calls, rounds)
    for program in calls:
        how = hows.get(program, "").partition(":")[0]
        ratios = quartiles(times[program] / times[BASE])
        seconds = f"{first[program]:.1f} | {first[program] / first[BASE]:.2f}"
        yield f"| {name} | {stage} | {program} | {how} | {seconds} | {ratios} |"


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_enable_compilation_cache", False)
    cases = [(name, stage) for name in MODELS for stage in (2, 3)]
    found = [rows(*case, 2 if smoke else 15, smoke) for case in cases[-1 if smoke else 0 :]]
    names = "| model | stage | step | runs | first call, CPU s | / jit | a step / jit |"
    table = _results.table(f"{names}\n|{'---|' * 7}", (row for part in found for row in part))
    if not smoke:
        about = (
            "8 virtual devices on the cores of one CPU; AdamW in float32. A first call traces, "
            "proves, compiles and runs, without a cache: CPU seconds. Steps: median of 15 rounds "
            "(quartiles)."
        )
        _results.write("loss_programs", "How a loss runs: first calls and steps", about, table)


if __name__ == "__main__":
    main()
