"""How long gradient syncs take where the network is slow: 4 processes on one machine.

Each process is one CPU device of JAX (gloo) in a network namespace of its own, on a link that is
limited in both directions. Sparse syncs: a table of V rows of which each device has 1 %, as words
are distributed (Zipf). A round runs every sync of a gradient once, after a barrier; a time is that
of the slowest process, and the table has the median over rounds.

  python benchmarks/sync_time.py            # needs Linux and root; writes benchmarks/results/
  python benchmarks/sync_time.py --smoke    # small, no limits, needs no root; prints only
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _network
import _results
import jax
import jax.numpy as jnp
import numpy as np
from gradient_sync import DENSITY, WIDTH, words
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding import sync

NUM, PORT = 4, 7777
NETWORKS = {"1 Gbit/s": 1.0, "10 Gbit/s": 10.0, "no limit": None}
MATRIX, TABLES, ROUNDS = (4096, 1024), (2**16, 2**18), 15
SMOKE = (128, 128), (2**12,), 2
WARM_UP = 2
SECONDS = 600  # for one network
HEADER = """\
| network | gradient | sync | wire, MiB | sent, MiB | wire alone, ms | ms (quartiles) \
| dense / it | by wire alone |
|---|---|---|---|---|---|---|---|---|"""


@dataclasses.dataclass
class Found:
    """The measurements of one process for one sync."""

    gradient: str
    sync: str
    wire: float  # bytes, by the compiled program
    ms: list[float]
    sent: list[int]  # bytes, by the kernel


# --- One of the processes -------------------------------------------------------------------------


def gradients(
    rank: int, matrix: tuple[int, int], tables: tuple[int, ...]
) -> Iterator[tuple[str, np.ndarray, dict[str, sync.GradientSync]]]:
    """Name, gradient of this device, and the syncs to measure."""
    rng = np.random.default_rng(rank)
    lossy = {
        "dense": sync.dense(),
        "qsgd(8)": sync.qsgd(8),
        "qsgd(4)": sync.qsgd(4),
        'qsgd(8, rounding="nearest")': sync.qsgd(8, rounding="nearest"),
        'qsgd(4, rounding="nearest")': sync.qsgd(4, rounding="nearest"),
        "powersgd(4)": sync.powersgd(4),
        "gradzip(4)": sync.gradzip(4),
        "top_k(0.01)": sync.top_k(0.01),
        "top_k(0.001)": sync.top_k(0.001),
    }
    yield f"{matrix[0]} x {matrix[1]}", rng.standard_normal(matrix, np.float32), lossy
    for rows in tables:
        ids = words(NUM, rows)
        found = sync.Sparsity.measure(ids, rows, WIDTH)
        sparse = {
            "dense": sync.dense(),
            "zen": sync.zen(found.density, union_density=found.union_density),
            "agsparse": sync.agsparse(found.density),
        }
        table = np.zeros((rows, WIDTH), np.float32)
        table[ids[rank]] = rng.standard_normal((ids[rank].size, WIDTH), np.float32)
        yield f"2^{rows.bit_length() - 1} x {WIDTH}, {DENSITY:.0%}", table, sparse


def work(rank: int, coordinator: str, folder: pathlib.Path, smoke: bool) -> None:
    """Measures all syncs together with the other processes; writes the figures of this one."""
    if smoke:  # which compiles for longer than it runs
        os.environ["XLA_FLAGS"] = (
            "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, NUM, rank)
    mesh = jax.make_mesh((NUM,), ("data",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, P("data"))
    add = jax.jit(lambda x: jnp.sum(x), out_shardings=NamedSharding(mesh, P()))
    ones = jax.make_array_from_process_local_data(sharded, np.ones(1))
    matrix, tables, rounds = SMOKE if smoke else (MATRIX, TABLES, ROUNDS)
    found: list[Found] = []
    for name, own, methods in gradients(rank, matrix, tables):
        x = jax.make_array_from_process_local_data(sharded, own[None])
        steps, states, results = {}, {}, {}
        for key, method in methods.items():
            tx = sync.transformation(method, "data", NUM)
            states[key] = jax.jit(lambda tx=tx, like=own: tx.init(like), out_shardings=sharded)()
            steps[key] = compile_step(tx, mesh, x, states[key])
            # Of sparse syncs the branch of sparse gradients; of gradzip the mean of its two steps.
            branches = ("cheapest", "dearest") if key.startswith("gradzip") else ("cheapest",)
            wire = float(np.mean([shd.wire_bytes(steps[key], branches=x) for x in branches]))
            results[key] = Found(name, key, wire, [], [])
        for i in range(WARM_UP + rounds):
            for key, step in steps.items():
                add(ones).block_until_ready()  # the barrier
                sent, start = 0 if smoke else _network.bytes_sent(), time.perf_counter()
                mean, states[key] = jax.block_until_ready(step(x, states[key]))
                seconds = time.perf_counter() - start
                del mean
                if i >= WARM_UP:
                    results[key].ms.append(1e3 * seconds)
                    results[key].sent.append(0 if smoke else _network.bytes_sent() - sent)
        found += results.values()
    text = json.dumps([dataclasses.asdict(each) for each in found])
    (folder / f"{rank}.json").write_text(text)


def compile_step(tx: Any, mesh: jax.sharding.Mesh, x: jax.Array, state: Any) -> Any:
    """The program of one sync: gradients and state to their mean and the new state."""
    specs = P("data"), P("data")
    mapped = jax.shard_map(
        lambda x, state: tx.update(x[0], state),
        mesh=mesh,
        in_specs=specs,
        out_specs=(P(), P("data")),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=1).lower(x, state).compile()


# --- All of them ----------------------------------------------------------------------------------


def measure(gbits: float | None, smoke: bool) -> list[list[Found]]:
    """The figures of each process, on a network of its own; on that of the machine if small."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def command(rank: int, coordinator: str) -> list[str]:
            worker = [sys.executable, __file__, "--worker", str(rank), coordinator, name]
            return worker + (["--smoke"] if smoke else [])

        if smoke:
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                where = f"localhost:{probe.getsockname()[1]}"
            _network.run_all([command(i, where) for i in range(NUM)], folder, SECONDS)
        else:
            where = f"{_network.address(0)}:{PORT}"
            with _network.network(NUM, gbits) as prefix:
                commands = [prefix(i) + command(i, where) for i in range(NUM)]
                _network.run_all(commands, folder, SECONDS)
        read = [json.loads((folder / f"{i}.json").read_text()) for i in range(NUM)]
    return [[Found(**each) for each in process] for process in read]


def rows(smoke: bool) -> Iterator[str]:
    """A line for each network, gradient and sync.

    Raises:
      SystemExit: the network carried more than it should.
    """
    for network, gbits in {"no limit": None}.items() if smoke else NETWORKS.items():
        for each in zip(*measure(gbits, smoke), strict=True):
            wire, sent = each[0].wire, max(np.median(one.sent) for one in each)
            slowest = np.max([one.ms for one in each], axis=0)
            low, ms, high = np.percentile(slowest, [25, 50, 75])
            if each[0].sync == "dense":
                dense_ms, dense_wire = ms, wire
            alone = None if gbits is None else 8e-6 * wire / gbits
            carried = 0 if gbits is None else 8e-6 * (sent - _network.BURST) / gbits
            if low < carried:
                raise SystemExit(f"{network} is no limit here: {sent:,.0f} bytes in {low:.1f} ms.")
            yield (
                f"| {network} | {each[0].gradient} | {each[0].sync} | {wire / 2**20:.2f} "
                f"| {f'{sent / 2**20:.2f}' if sent else '-'} "
                f"| {'-' if alone is None else f'{alone:.1f}'} "
                f"| {ms:.1f} ({low:.1f}-{high:.1f}) "
                f"| {dense_ms / ms:.2f} | {dense_wire / wire:.1f} |"
            )


def main() -> None:
    """Prints the table; writes that of the networks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small, no limits, no root; no file")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        rank, coordinator, folder = options.worker
        work(int(rank), coordinator, pathlib.Path(folder), options.smoke)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated."))
    if not options.smoke:
        _network.check()
    table = _results.table(HEADER, rows(options.smoke))
    if not options.smoke:
        about = (
            f"{NUM} processes, one CPU device each (gloo), on {os.cpu_count()} cores that they "
            "share. Each in a network namespace, joined to a bridge by a pair of virtual Ethernet "
            "devices; `tc`'s token bucket (tbf) at both ends limits what a process sends and "
            f"receives. Median of {ROUNDS} rounds, in each of which every sync of a gradient runs "
            "once; the slowest process counts. `wire` is the bytes that one device sends by the "
            "compiled program, `sent` those that the kernel counted, with headers; `wire alone` is "
            "the time of the former at the limit. The rest is computing and copying, which the "
            "processes do at the same time on the same cores: with a core for each it would be "
            "less. Where `no limit` is no faster, the cores are the limit."
        )
        _results.write("sync_time", "Gradient syncs: time on slow networks", about, table)


if __name__ == "__main__":
    main()
