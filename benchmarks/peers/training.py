"""Training beside PyTorch and DeepSpeed: losses, bytes held, bytes sent, seconds, lines of code.

The same decoder, parameters, data and AdamW in float32, in four processes of one CPU that talk by
gloo. Bytes sent are read from the network interface, in a network namespace of their own, which
needs Linux and root. PyTorch is not installed by this project:

  python -m venv /tmp/torch && /tmp/torch/bin/pip install torch numpy deepspeed
  python benchmarks/peers/training.py --torch /tmp/torch   # writes results/peers.md
  python benchmarks/peers/training.py --smoke              # this library alone, prints only
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _measured
import _results

FOLDER = pathlib.Path(__file__).resolve().parent
PORT = 29_911  # of the first process
HEADER = """
| library | apart | parameters, MB | state, MB | sent, MB | seconds | lines |
|---|---|---|---|---|---|---|
""".strip()
HEADER_OF_BITS = """
| AdamW | apart | last loss | state, MB | largest change | seconds |
|---|---|---|---|---|---|
""".strip()
# By the name of a kind; those with a number of a stage or of bits alone are ours.
LIBRARIES = {
    "stage_0": "`Zero(stage=0)`",
    "ddp": "PyTorch DDP",
    "stage_1": "`Zero(stage=1)`",
    "ddp_zero_1": "PyTorch DDP with `ZeroRedundancyOptimizer`",
    "deepspeed_1": "DeepSpeed, stage 1",
    "stage_2": "`Zero(stage=2)`",
    "fsdp2_zero_2": "PyTorch FSDP2, `reshard_after_forward=False`",
    "deepspeed_2": "DeepSpeed, stage 2",
    "stage_3": "`Zero(stage=3)`",
    "fsdp2_zero_3": "PyTorch FSDP2",
    "deepspeed_3": "DeepSpeed, stage 3",
}

# The same for state in few bits, one process each.
IN_FEW_BITS = {
    "bits_32": "`optax.adamw`",
    "alone_torch": "PyTorch",
    "bits_8": "`optax_ext.adamw8bit`",
    "alone_bitsandbytes_8": "bitsandbytes, 8 bits",
    "alone_torchao_8": "torchao, 8 bits",
    "alone_torchao_fp8": "torchao, fp8",
    "bits_4": "`optax_ext.low_precision_state`, 4 bits",
    "alone_torchao_4": "torchao, 4 bits",
}


def ours(loss_fn: Any, params: Any, tx: Any, stage: int) -> Any:
    """The user's code, of which lines are counted."""
    import jax

    import sharding as shd

    zero = shd.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=stage)
    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    step = zero.train_step(loss_fn, tx=tx)
    return state, lambda state, tokens: step(state, zero.put(tokens))


def optimizer(bits: int) -> Any:
    """AdamW with its state in 32, 8 or 4 bits."""
    import optax

    import optax_ext

    tx = optax.adamw(1e-3, weight_decay=0.1)
    return tx if bits == 32 else optax_ext.low_precision_state(tx, bits=bits)


def worker(kind: str, folder: pathlib.Path, rank: int, count: int) -> None:
    """One of ``count`` processes with a device each; the first writes what was found."""
    import jax
    from jax.experimental.multihost_utils import sync_global_devices

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{PORT}", count, rank)
    arrays = dict(np.load(folder / "input.npz"))
    model = decoder(*arrays.pop("sizes").tolist())
    batches = arrays.pop("batches")
    what, number = kind.split("_")
    stage, bits = (int(number), 32) if what == "stage" else (0, int(number))
    layer = jax.checkpoint(model.apply_layer) if stage == 3 else None
    state, step = ours(model.make_loss(layer), nested(arrays), optimizer(bits), stage)
    rows = batches.shape[1] // count
    losses = []
    seconds = []
    largest = 0.0
    before = 0
    for i, tokens in enumerate(batches[:, rank * rows : (rank + 1) * rows]):
        if i == _measured.PASSED:
            sync_global_devices("before")
            before = _measured.sent()
        old = jax.tree.map(np.asarray, state[0]) if what == "bits" else {}
        started = time.perf_counter()
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - started)
        changes = jax.tree.map(lambda x, y: np.abs(x - y).max(), state[0], old) if old else {}
        largest = max([largest, *map(float, jax.tree.leaves(changes))])
    after = _measured.sent()
    held = [
        sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(part)) for part in state
    ]
    found = {
        "losses": losses,
        "seconds": seconds,
        "sent": (after - before) / (len(batches) - _measured.PASSED) / count,
        "params": held[0],
        "state": held[1],
        "largest": largest,
        "lines": _measured.lines_of(ours),
        "version": jax.__version__,
    }
    sync_global_devices("after")
    if rank == 0:
        (folder / f"{kind}.json").write_text(json.dumps(found))


def decoder(*sizes: int) -> Any:
    """Layers, width, heads, MLP, vocabulary, length."""
    from sharding.plan import Decoder

    layers, width, heads, hidden, vocabulary, length = sizes
    return Decoder(layers, width, heads, heads, hidden, vocabulary, length)


def nested(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Parameters of the decoder, from those by path."""
    of_layer = {k.split("/")[1]: x for k, x in arrays.items() if k.startswith("layers/")}
    norms = ("attention_norm", "mlp_norm")
    layers = {k: {"scale": x} if k in norms else x for k, x in of_layer.items()}
    outside = {k: arrays[k] for k in ("embed", "unembed")}
    return {"layers": layers, "norm": {"scale": arrays["norm"]}, **outside}


def write_input(folder: pathlib.Path, sizes: tuple[int, ...], steps: int) -> None:
    """Parameters and batches of a Markov chain, which every library reads."""
    layers, width, heads, hidden, vocabulary, length = sizes
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(0, 0.02, shape).astype(np.float32)  # noqa: E731
    squares = {name: draw(layers, width, width) for name in ("query", "key", "value", "out")}
    ones = np.ones((layers, width), np.float32)
    stacks = squares | {
        "up": draw(layers, width, hidden),
        "gate": draw(layers, width, hidden),
        "down": draw(layers, hidden, width),
        "attention_norm": ones,
        "mlp_norm": ones,
    }
    after = rng.integers(vocabulary, size=(vocabulary, 4))
    batches = rng.integers(vocabulary, size=(steps, 8, length + 1))
    for i in range(length):
        batches[..., i + 1] = after[batches[..., i], rng.integers(4, size=(steps, 8))]
    arrays = {f"layers/{name}": x for name, x in stacks.items()}
    arrays |= {"embed": draw(vocabulary, width), "unembed": draw(width, vocabulary)}
    arrays |= {"norm": np.ones(width, np.float32), "batches": batches.astype(np.int32)}
    np.savez(folder / "input.npz", sizes=np.array(sizes), heads=heads, **arrays)


def run(kind: str, folder: pathlib.Path, count: int, torch: pathlib.Path | None) -> dict[str, Any]:
    """What the processes of a kind found.

    Raises:
      RuntimeError: one of them failed; the last line that it printed.
    """
    quiet = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    here = str(FOLDER.parents[1])
    if is_ours(kind):
        each = [sys.executable, __file__, "--worker", kind, "--folder", str(folder)]
        quiet["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
        command = (
            "; ".join(
                " ".join([*each, "--rank", str(i), "--count", str(count), "&"])
                for i in range(count)
            ).replace("&;", "&")
            + " wait"
        )
    else:
        script = str(FOLDER / "_in_torch.py")
        each = [f"{torch}/bin/torchrun", "--nproc-per-node", str(count), script, kind, str(folder)]
        command = " ".join(each)
    alone = ["unshare", "-n"] if _can_be_alone() else []
    up = "ip link set lo up; " if alone else ""
    ended = subprocess.run(
        [*alone, "sh", "-c", up + command], env=os.environ | quiet, capture_output=True, text=True
    )
    found = folder / f"{kind}.json"
    if not found.exists():
        said = [line for line in ended.stderr.splitlines() if "Error" in line] or ["no output"]
        raise RuntimeError(f"{kind}: {said[-1].strip()}")
    return json.loads(found.read_text())


def _can_be_alone() -> bool:
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


def is_ours(kind: str) -> bool:
    """Whether this library trains."""
    return kind.startswith(("stage_", "bits_"))


Found = tuple[str, dict[str, Any] | None, float]


def runs(
    kinds: dict[str, str], folder: pathlib.Path, count: int, torch: pathlib.Path | None
) -> Iterator[Found]:
    """Of each kind its name, what was found, and the largest difference of a loss from the first.

    Of a kind that failed, the name and why.
    """
    first: np.ndarray | None = None
    for kind, name in kinds.items():
        if torch is None and not is_ours(kind):
            continue
        try:
            found = run(kind, folder, count, torch)
        except RuntimeError as error:
            yield f"{name}: {error}", None, 0.0
            continue
        losses = np.array(found["losses"])
        first = losses if first is None else first
        yield name, found, float(np.abs(losses - first).max())


def median(found: dict[str, Any]) -> float:
    """Seconds of a step."""
    return statistics.median(found["seconds"][_measured.PASSED :])


def row_of_training(name: str, found: dict[str, Any] | None, apart: float) -> str:
    """Of a library that shards."""
    if found is None:
        return f"| {name} | | | | | | |"
    sizes = " | ".join(f"{found[k] / 1e6:.2f}" for k in ("params", "state", "sent"))
    return f"| {name} | {apart:.1e} | {sizes} | {median(found):.2f} | {found['lines']} |"


def row_of_bits(name: str, found: dict[str, Any] | None, apart: float) -> str:
    """Of an optimizer with state in few bits."""
    if found is None:
        return f"| {name} | | | | | |"
    last = np.mean(found["losses"][-10:])
    largest = f"{found['largest']:.1e} | {median(found):.2f}"
    return f"| {name} | {apart:.1e} | {last:.4f} | {found['state'] / 1e6:.2f} | {largest} |"


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--torch", type=pathlib.Path, help="a virtual environment with PyTorch")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.folder, args.rank, args.count)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        sizes = (2, 32, 2, 64, 64, 16) if args.smoke else (4, 128, 4, 352, 1024, 64)
        write_input(folder, sizes, 4 if args.smoke else 50)
        sharded = runs(LIBRARIES, folder, 2 if args.smoke else 4, args.torch)
        tables = [_results.table(HEADER, (row_of_training(*found) for found in sharded))]
        coded = runs(IN_FEW_BITS, folder, 1, args.torch)
        tables += [_results.table(HEADER_OF_BITS, (row_of_bits(*found) for found in coded))]
    if args.torch and not args.smoke:
        parts = (ABOUT, tables[0], BITS, tables[1], BETTER)
        _results.write("peers", "Training beside others", *parts, script="peers/training")


ABOUT = """A decoder of four layers of width 128 (1.06M parameters), 50 steps of AdamW on eight
sequences of 64 tokens, in float32, with the same parameters and data. Four processes on two cores,
which talk by gloo. `apart`: the largest difference of a step's loss from `Zero(stage=0)`'s. Bytes
are those of a process between steps; sent bytes are those of the network interface, with TCP's own.
Seconds are medians beside other work on the cores: read no more than an order from them. Lines are
the user's, from a model to a step. PyTorch 2.13.0, DeepSpeed 0.19.8, bitsandbytes 0.50.2,
torchao 0.18.0. DeepSpeed's default clips gradients at 1, which is switched off here."""
BETTER = """In this run steps of PyTorch and DeepSpeed took a third to two thirds of the
time of ours, and bitsandbytes was as close to float32 in 8 bits as this library. FSDP2 and
`Zero(stage=3)` hold a quarter of everything; FSDP2 sent more over gloo. Stages 1 and 2 of DeepSpeed
hold copies of parameters and send more. With torchao's 8-bit and fp8 states a parameter moved by
hundreds of learning rates in one step; its fp8 run ended with the lowest loss all the same."""
BITS = "State in few bits, in one process; `largest change` is of a parameter in one step."

if __name__ == "__main__":
    main()
