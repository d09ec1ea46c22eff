"""Time of an optimizer's step on this machine, beside what a user would pick instead.

All take the same matrices in rounds, each in an order of its own. The bytes that a step must move,
at the bandwidth of a copy measured in the same rounds, are the time below which none can be. Then
the start-up: how long it takes to trace and compile the step of a model with 500 arrays.

PyTorch and the authors' CAME take part where they are installed: pip install '.[parity]'.

  python benchmarks/step_time.py            # writes benchmarks/results/step_time_<platform>.md
  python benchmarks/step_time.py --platform gpu
  python benchmarks/step_time.py --smoke    # small, prints only
"""

import argparse
import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import _results
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from _steps import quartiles, replacing, step_of, time_alternately

import optax_ext

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# The MLPs of six blocks and an embedding: 56.6 million parameters.
SHAPES = [(1024, 4096)] * 6 + [(4096, 1024)] * 6 + [(6144, 1024)]
LEARNING_RATE = 1e-3
Times = Mapping[str, np.ndarray]


@dataclasses.dataclass
class Contender:
    """One optimizer with its parameters.

    Attributes:
      floor: bytes per parameter that its step reads and writes at least, if each matrix comes from
        memory whenever a sum over it must be finished first.
      step: takes one step and waits for it.
    """

    floor: int
    step: Callable[[], None]


# What each must move: AdamW reads four arrays and writes three. CAME reads the gradient for the
# second moment, for the clip and for the momentum, which it reads and writes, and then again reads
# momentum and parameter to write the parameter.
OPTIMIZERS: dict[str, tuple[int, Callable[[], optax.GradientTransformation]]] = {
    "optax.adamw": (28, lambda: optax.adamw(LEARNING_RATE)),
    "optax.adafactor": (24, lambda: optax.adafactor(LEARNING_RATE)),
    "optax.adafactor, momentum": (32, lambda: optax.adafactor(LEARNING_RATE, momentum=0.9)),
    "optax_ext.came": (32, lambda: optax_ext.came(LEARNING_RATE)),
    "optax_ext.adafactor, no scale": (
        20,
        lambda: optax_ext.adafactor(LEARNING_RATE, multiply_by_parameter_scale=False),
    ),
    "optax_ext.adafactor": (24, lambda: optax_ext.adafactor(LEARNING_RATE)),
    "optax_ext.adafactor, momentum": (
        32,
        lambda: optax_ext.adafactor(LEARNING_RATE, momentum=0.9),
    ),
}


def gradients(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Full-rank gradients, whose rows and columns differ in scale."""
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=s) * rng.uniform(0.1, 1, (s[0],) + (1,) * (len(s) - 1))).astype(np.float32)
        for s in shapes
    ]


def of_jax(tx: optax.GradientTransformation, floor: int, grads: list[np.ndarray]) -> Contender:
    """A compiled step; parameters and state are donated, so that it works in place."""
    on_device = [jnp.asarray(g) for g in grads]
    held = [[jnp.full_like(g, 0.5) for g in on_device]]
    held.append(jax.jit(tx.init)(held[0]))
    compiled = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(*held, on_device).compile()
    return Contender(floor, replacing(compiled, held, on_device))


def of_torch(grads: list[np.ndarray]) -> dict[str, Contender]:
    """PyTorch's fused AdamW and Adafactor, and CAME of its authors."""
    import torch

    def one(make: Callable[[list], Any], floor: int) -> Contender:
        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        params = []
        for g in grads:
            param = torch.nn.Parameter(torch.full(g.shape, 0.5, device=device))
            param.grad = torch.from_numpy(g.copy()).to(device)
            params.append(param)
        optimizer = make(params)

        def once() -> None:
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()

        return Contender(floor, once)

    made = {
        "torch.optim.AdamW, fused": one(
            lambda p: torch.optim.AdamW(p, LEARNING_RATE, fused=True), 28
        ),
        "torch.optim.Adafactor": one(lambda p: torch.optim.Adafactor(p, LEARNING_RATE), 24),
    }
    if importlib.util.find_spec("came_pytorch"):
        from came_pytorch import CAME

        made["came-pytorch"] = one(lambda p: CAME(p, lr=LEARNING_RATE), 32)
    return made


def copy_of(grads: list[np.ndarray]) -> Contender:
    """A copy of every array in place of another: read 4 bytes, written 4."""
    return of_jax(
        optax.GradientTransformation(
            lambda params: None,
            lambda g, state, params: (jax.tree.map(jnp.subtract, g, params), None),
        ),
        12,
        grads,
    )


def check(grads: list[np.ndarray]) -> None:
    """The step of this platform equals that of one matrix at a time in eager operations."""
    full = jnp.asarray(grads[0])
    for g in (full, full[:-1, :-3]):  # the second is of a shape that no tile divides
        for make in (optax_ext.scale_by_came, optax_ext.scale_by_adafactor):
            with jax.disable_jit():
                want = last_update(make().update, make().init(g), g)
            out = last_update(jax.jit(make().update), make().init(g), g)
            error = float(jnp.linalg.norm(out - want) / jnp.linalg.norm(want))
            what = f"{make.__name__}, {g.shape}"
            if not error < 1e-5:
                raise AssertionError(f"{what}: updates differ by {error:.1e} of their norm.")
            print(f"{what} checked: {error:.1e}", flush=True)


def last_update(update: Callable[..., Any], state: Any, g: jax.Array) -> jax.Array:
    """The update of the third step with growing gradients."""
    for i in range(3):
        out, state = update(g * (1 + i), state)
    return out


def time_table(contenders: dict[str, Contender], times: Times, num_params: int) -> str:
    """Medians, ratios to optax.adamw round by round, and the share of the copy's bandwidth."""
    bandwidth = contenders["copy"].floor * num_params / np.median(times["copy"])

    def row(name: str, contender: Contender) -> str:
        median = np.median(times[name])
        share = contender.floor * num_params / median / bandwidth
        return (
            f"| {name} | {1e3 * median:.1f} | {quartiles(times[name] / times['optax.adamw'])} "
            f"| {contender.floor} | {share:.0%} |"
        )

    return _results.table(
        "| step | ms, median | / optax.adamw, median (quartiles) | bytes per parameter it must "
        "move | share of the copy's bandwidth |\n|---|---|---|---|---|",
        (row(name, one) for name, one in contenders.items()),
    )


def draw(contenders: dict[str, Contender], times: Times, num_params: int, path: Any) -> None:
    """Bytes that must move against time, and the line of the copy's bandwidth."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    slope = np.median(times["copy"]) / contenders["copy"].floor
    axes.plot([0, 36], [0, 36e3 * slope], color="grey", label="at the bandwidth of a copy")
    for i, (name, one) in enumerate(contenders.items()):
        low, middle, high = 1e3 * np.percentile(times[name], (25, 50, 75))
        axes.errorbar(
            one.floor,
            middle,
            yerr=[[middle - low], [high - middle]],
            marker="osD^v"[i // 10] if "optax_ext" not in name else "*",
            markersize=12 if "optax_ext" in name else 6,
            label=name,
        )
    axes.set(xlabel="bytes per parameter that must move", ylabel="ms a step", ylim=(0, None))
    axes.set_title(f"One step of {num_params / 1e6:.1f}M parameters")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def startup_table(arrays: int) -> str:
    """Seconds from a Python function to a program, for a model of many arrays."""
    block = [(256, 256)] * 4 + [(256, 1024), (1024, 256)] + [(256,)] * 4 + [(1024,), (256,)]
    shapes = [block[i % len(block)] for i in range(arrays)]
    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]

    def rows():
        base = None
        for name in ("optax.adamw", "optax.adafactor", "optax_ext.adafactor", "optax_ext.came"):
            tx = OPTIMIZERS[name][1]()

            state = jax.eval_shape(tx.init, params)
            jax.clear_caches()
            start = time.perf_counter()
            lowered = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(params, state, params)
            traced = time.perf_counter() - start
            lowered.compile()
            seconds = time.perf_counter() - start
            base = base or seconds
            yield f"| {name} | {traced:.2f} | {seconds:.2f} | {seconds / base:.1f} |"

    return _results.table(
        "| step | traced and lowered in, s | and compiled, s | / optax.adamw |\n|---|---|---|---|",
        rows(),
    )


def main() -> None:
    """Checks and measures; writes the tables of full size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small, without PyTorch; no file")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--arrays", type=int, default=500, help="of the model whose start is timed")
    parser.add_argument("--platform", default="cpu", help="cpu or gpu")
    options = parser.parse_args()
    jax.config.update("jax_platforms", {"gpu": "cuda"}.get(options.platform, options.platform))
    shapes = [(64, 256)] * 2 if options.smoke else SHAPES
    grads = gradients(shapes)
    num_params = sum(g.size for g in grads)
    check(grads)
    contenders = {"copy": copy_of(grads)}
    contenders |= {n: of_jax(make(), floor, grads) for n, (floor, make) in OPTIMIZERS.items()}
    if not options.smoke and importlib.util.find_spec("torch"):
        contenders |= of_torch(grads)
    times = time_alternately(
        {name: one.step for name, one in contenders.items()}, 2 if options.smoke else options.rounds
    )
    step_table = time_table(contenders, times, num_params)
    startup = startup_table(12 if options.smoke else options.arrays)
    if options.smoke:
        return
    platform = jax.default_backend()
    where = (
        f"{len(os.sched_getaffinity(0))} CPU cores"
        if platform == "cpu"
        else jax.devices()[0].device_kind
    )
    name = f"step_time_{platform}"
    bandwidth = contenders["copy"].floor * num_params / np.median(times["copy"]) / 1e9
    draw(contenders, times, num_params, _results.RESULTS / f"{name}.png")
    _results.write(
        name,
        "Time of a step",
        f"On {where}: {num_params / 1e6:.1f}M float32 parameters in {len(grads)} matrices, "
        f"{options.rounds} rounds. The copy reads two arrays and writes one, at "
        f"{bandwidth:.0f} GB/s.",
        step_table,
        f"![Bytes and time]({name}.png)",
        f"Start-up of a step for {options.arrays} arrays, half of them matrices",
        startup,
        script="step_time",
    )


if __name__ == "__main__":
    main()
