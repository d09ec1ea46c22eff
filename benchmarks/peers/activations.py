"""Activations under a budget: `remat.plan` beside PyTorch's activation memory budget, on a CPU.

ResNet-50 and GPT-2 of `_networks.py`, float32, operation by operation the same, one thread. What
each gradient holds and takes is measured, beside its own without a plan. PyTorch's budget runs from
1, what torch.compile stores by itself, to 0, all computed again. PyTorch is not installed by this
project:

  python -m venv /tmp/torch && /tmp/torch/bin/pip install torch numpy
  python benchmarks/peers/activations.py --torch /tmp/torch  # writes results/peers_activations.md
  python benchmarks/peers/activations.py --smoke             # this library alone, prints only
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _results
import jax
import jax.numpy as jnp
from _networks import NETWORKS

from sharding import remat

MIB = 2**20
ROUNDS = 9
# By network: a divisor of widths and sizes.
SCALES = {"GPT-2, unrolled": 4, "ResNet-50": 4}
SHARES = (0.5, 0.33)  # of the bytes without a plan
BUDGETS = (0.5, 0.25, 0.0)  # PyTorch's
HEADER = """
| network | planner | budget | held, MiB | / plain | time planned | time measured | s to plan |
|---|---|---|---|---|---|---|---|
""".strip()


def numbers(types: Any) -> Any:
    """Arrays of these types."""

    def make(t: Any) -> Any:
        if jnp.issubdtype(t.dtype, jnp.integer):
            return jax.random.randint(jax.random.key(1), t.shape, 0, 256, t.dtype)
        return 0.03 * jax.random.normal(jax.random.key(0), t.shape, t.dtype)

    return jax.tree.map(make, types)


def gradient(loss: Any, args: Any) -> tuple[int, float]:
    """Bytes of temporaries of the program, and its seconds."""
    program = jax.jit(jax.grad(loss)).lower(*args).compile()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        jax.block_until_ready(program(*args))
        seconds.append(time.perf_counter() - started)
    return program.memory_analysis().temp_size_in_bytes, statistics.median(seconds)


def ours(name: str, scale: int) -> Iterator[str]:
    """Rows of `remat.plan`."""
    loss, params, batch = NETWORKS[name](scale)
    args = numbers((params, batch))
    held, plain = gradient(loss, args)
    yield f"| {name} | JAX | none | {held / MIB:.1f} | 1.00 | | | |"
    for share in SHARES:
        started = time.perf_counter()
        cells = f"| {name} | `remat.plan` | {share:.0%} of plain"
        try:
            planned = remat.plan(loss, params, batch, held * share)
        except ValueError as error:
            print(error, file=sys.stderr)
            yield f"{cells} | no plan fits | | | | |"
            continue
        took = time.perf_counter() - started
        found, seconds = gradient(planned, args)
        figures = f"{found / MIB:.1f} | {found / held:.2f} | {planned.extra_time:+.1%}"
        yield f"{cells} | {figures} | {seconds / plain - 1:+.1%} | {took:.0f} |"


def theirs(name: str, scale: int, torch: pathlib.Path) -> Iterator[str]:
    """Rows of PyTorch: what the passes store, and the peak of the process in brackets."""
    script = str(pathlib.Path(__file__).with_name("_activations_in_torch.py"))
    plain: dict[str, float] = {}
    for budget in (1.0, *BUDGETS):
        command = [str(torch / "bin/python"), script, name, str(scale), str(budget), str(ROUNDS)]
        quiet = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=quiet, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(ended.stderr[-1000:])
        found = json.loads(ended.stdout.splitlines()[-1])
        plain = plain or found
        held = f"{found['saved'] / MIB:.1f} ({found['peak'] / MIB:.1f})"
        ratios = [found[key] / plain[key] for key in ("saved", "peak", "seconds")]
        cells = f"{held} | {ratios[0]:.2f} ({ratios[1]:.2f}) | | {ratios[2] - 1:+.1%}"
        yield f"| {name} | PyTorch | {budget:g} | {cells} | {found['compiling']:.0f} |"


def rows(smoke: bool, torch: pathlib.Path | None) -> Iterator[str]:
    """Of both networks; a small one alone."""
    for name, scale in {"LSTM": 16}.items() if smoke else SCALES.items():
        if torch is not None and not smoke:
            yield from theirs(name, scale, torch)
        yield from ours(name, scale)


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--torch", type=pathlib.Path, help="a virtual environment with PyTorch")
    args = parser.parse_args()
    table = _results.table(HEADER, rows(args.smoke, args.torch))
    if args.torch and not args.smoke:
        title = "Activations under a budget, beside PyTorch"
        _results.write("peers_activations", title, ABOUT, table, script="peers/activations")


ABOUT = """float32, one thread; beside other work on the cores. Held: of JAX the temporaries of the
compiled gradient; of PyTorch what is stored between the passes, in brackets what the process grows
by at its peak. Time is more than the same library's without a plan; PyTorch plans none. Seconds to
plan have those of compiling."""

if __name__ == "__main__":
    main()
