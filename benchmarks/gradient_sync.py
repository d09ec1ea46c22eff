"""Bytes that each gradient sync sends: compiled programs beside their formulas.

Sparse syncs: one table of V rows, of which each device has those of a batch of tokens, drawn from a
Zipf distribution as words are until the batch has 1 % of all rows. Capacities are those of the
measured densities, and the branches of the program that these gradients take count. SparCML and
OmniReduce are formulas alone. Then steps of ZeRO that look up rows of a table. TPU targets need
libtpu: pip install '.[aot]'. Nothing is run.

  python benchmarks/gradient_sync.py            # prints the tables, writes benchmarks/results/
  python benchmarks/gradient_sync.py --smoke    # 8 virtual CPU devices, prints only
"""

import argparse
import math
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding import sync
from sharding.collectives._sparse_rows import RowHash, list_capacity
from sharding.plan import targets

SPARSE = [  # target, devices, rows
    ("cpu:8", 8, 2**18),
    ("v5e:4x4", 16, 2**18),
    ("v5e:4x4", 16, 2**22),
    ("v5e:8x8", 64, 2**18),
    ("v5e:8x8", 64, 2**22),
    ("h200x16", 16, 2**22),
    ("h200x64", 64, 2**22),
]
TABLES = [("v5e:4x4", 16), ("h200x16", 16)]
LOOKUPS = 4096  # of a device in a step
LOSSY = [("cpu:8", 8), ("v5e:4x4", 16), ("h200x64", 64)]
WIDTH, DENSITY = 64, 0.01
MATRIX = (4096, 4096)
SPARSE_HEADER = """\
| target | V | density, of the sum | skewness, of the sum | hashed: fullest owner | rounds |\
 zen, MiB | / formula | bound | dense | agsparse | formula: sparcml | omnireduce |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""
TABLE_HEADER = """\
| target | stage | gradient of the table | sent in a step, MiB | temporaries, MiB |
|---|---|---|---|---|"""
LOSSY_HEADER = """\
| target | sync | full mean, MiB | / formula | a shard, MiB | / formula | / dense |
|---|---|---|---|---|---|---|"""


def words(num: int, rows: int, seed: int = 0) -> list[np.ndarray]:
    """Rows of each device, 1 % of all: distinct draws from a Zipf distribution."""
    rng, found = np.random.default_rng(seed), []
    cumulative = np.cumsum(1 / np.arange(1, rows + 1))
    wanted = int(DENSITY * rows)
    for _ in range(num):
        distinct = np.array([], np.int64)
        while distinct.size < wanted:
            draws = np.searchsorted(cumulative, rng.random(wanted) * cumulative[-1])
            drawn = np.concatenate([distinct, draws])
            _, first = np.unique(drawn, return_index=True)
            distinct = drawn[np.sort(first)]  # in the order of the draws
        found.append(distinct[:wanted])
    return found


def sent(
    target: str,
    num: int,
    method: sync.GradientSync,
    shape: tuple[int, ...],
    dim: int = 0,
) -> float:
    """Bytes that one device sends for one gradient, in a compiled program."""
    mesh = targets.mesh(target, (num,), ("data",))
    state = method.init(jax.ShapeDtypeStruct(shape, jnp.float32))

    def run(x: jax.Array) -> jax.Array:
        return method.reduce_scatter(x[0], state, "data", dim)[0][None]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    sharding = jax.sharding.NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((num, *shape), jnp.float32, sharding=sharding)
    return shd.wire_bytes(jax.jit(mapped).lower(x).compile(), branches="cheapest")


def nonzero(ids: list[np.ndarray]) -> int:
    """How many rows are nonzero in the sum over some devices."""
    return np.unique(np.concatenate(ids)).size


def skewness(ids: np.ndarray, rows: int, num: int) -> float:
    """The fullest of so many contiguous ranges of rows over the mean."""
    counts = np.bincount(ids // -(-rows // num), minlength=num)
    return float(counts.max() * num / ids.size)


def formulas_of_others(ids: list[np.ndarray], rows: int) -> tuple[tuple[float, float], list[float]]:
    """Skewness of one device and of the sum; bytes that SparCML and OmniReduce send."""
    num, union = len(ids), np.unique(np.concatenate(ids))
    one = float(np.mean([skewness(x, rows, num) for x in ids]))
    both = one, skewness(union, rows, num)
    # SparCML: in round i the nonzero rows of the sums over 2^i devices, with their indices.
    sizes = [2**i for i in range(math.ceil(math.log2(num)))]
    groups = [[ids[i : i + n] for i in range(0, num - n + 1, n)] for n in sizes]
    sparcml = sum(float(np.mean(list(map(nonzero, group)))) for group in groups) * (4 * WIDTH + 4)
    # OmniReduce: nonzero blocks of 256 elements, of the fullest range.
    blocks = [np.unique(x // max(1, 256 // WIDTH)).size for x in (*ids, union)]
    found = both[0] * float(np.mean(blocks[:-1])) + both[1] * blocks[-1]
    return both, [sparcml, (num - 1) / num * found * 256 * 4]


def sparse_rows(smoke: bool) -> Iterator[str]:
    """A line for each target and size."""
    for target, num, rows in [("cpu:8", 8, 2**12)] if smoke else SPARSE:
        ids = words(num, rows)
        found = sync.Sparsity.measure(ids, rows, WIDTH)
        one, union = found.density, found.union_density
        mixed = np.asarray(RowHash(rows).apply(jnp.arange(rows, dtype=jnp.int32)))
        slots = -(-rows // num)  # rows of an owner
        counts = np.stack([np.bincount(mixed[x] // slots, minlength=num) for x in ids])
        all_rows = np.unique(np.concatenate(ids))
        back = np.bincount(mixed[all_rows] // slots, minlength=num)
        capacity = list_capacity(one, slots, num**2)
        rounds = next(r for r in (1, 2, 4) if counts.max() <= r * capacity)
        assert back.max() <= list_capacity(union, slots, num)  # else all of the sum is sent
        fullest = max(counts.max() * num / counts.sum(1).max(), back.max() * num / back.sum())
        zen = sent(target, num, sync.zen(one, union_density=union), (rows, WIDTH))
        zen += (rounds - 1) * (num - 1) * capacity * 4 * (WIDTH + 1)
        agsparse = sent(target, num, sync.agsparse(one), (rows, WIDTH))
        dense = sent(target, num, sync.dense(), (rows, WIDTH))
        theory = found.bytes_sent()
        bound = 1 + math.sqrt(2 * math.log(100 * num**2) / (one * slots))
        skewed, others = formulas_of_others(ids, rows)
        mib = [x / 2**20 for x in (dense, agsparse, *others)]
        yield (
            f"| {target} | 2^{rows.bit_length() - 1} | {one:.2%}, {union:.2%} "
            f"| {skewed[0]:.1f}, {skewed[1]:.1f} | {fullest:.3f} | {rounds} "
            f"| {zen / 2**20:.1f} | {zen / theory['zen']:.3f} | {bound:.3f} | "
            + " | ".join(f"{x:,.1f}" for x in mib)
            + " |"
        )


def lossy_rows(smoke: bool) -> Iterator[str]:
    """A line for each target and sync whose bytes do not depend on a state."""
    rows, cols = (256, 256) if smoke else MATRIX
    size = rows * cols
    for target, num in LOSSY[:1] if smoke else LOSSY:
        share = (num - 1) / num
        # The sync, the bytes of its all-reduce, and the share of them in a reduce-scatter.
        cases = {
            "qsgd(8)": (sync.qsgd(8, rounding="nearest"), 2 * size * (1 + 4 / 512), 0.5),
            "qsgd(4)": (sync.qsgd(4, rounding="nearest"), 2 * size * (0.5 + 4 / 512), 0.5),
            "powersgd(4)": (sync.powersgd(4), 2 * 4 * 4 * (rows + cols), 1),
            "gradzip(4)": (sync.gradzip(4), 2 * 4 * 4 * max(rows, cols), 1),
            "top_k(0.001)": (sync.top_k(0.001), 8 * num * math.ceil(0.001 * size), 1),
        }
        dense = sent(target, num, sync.dense(), (rows, cols))
        for name, (method, formula, scattered) in cases.items():
            full = sent(target, num, method, (rows, cols))
            shard = sent(target, num, method, (rows, cols), -1)
            yield (
                f"| {target} | {name} | {full / 2**20:.2f} | {full / (share * formula):.3f} "
                f"| {shard / 2**20:.2f} | {shard / (share * formula * scattered):.3f} "
                f"| {full / dense:.4f} |"
            )


def table_rows(smoke: bool) -> Iterator[str]:
    """A line for each target, stage and way in which a step syncs a table's gradient."""
    rows, lookups = (2**12, 32) if smoke else (2**20, LOOKUPS)
    density = lookups / rows
    for target, num in [("cpu:8", 8)] if smoke else TABLES:
        mesh = targets.mesh(target, (num,), ("data",))
        for stage in (0, 2, 3):
            for name, method, by_rows in (
                ("dense", None, False),
                ("`zen` finds its rows", sync.zen(density), False),
                ("`zen` of `lookup`", sync.zen(density), True),
            ):
                compiled = lookup_step(shd.Zero(mesh, stage, sync=method), rows, lookups, by_rows)
                sent = shd.wire_bytes(compiled, branches="cheapest")
                memory = compiled.memory_analysis().temp_size_in_bytes
                yield (
                    f"| {target} | {stage} | {name} | {sent / 2**20:.2f} | {memory / 2**20:.1f} |"
                )


def lookup_step(zero: shd.Zero, rows: int, lookups: int, by_rows: bool) -> Any:
    """A compiled step of SGD whose loss looks up rows of a table, and nothing else."""
    tx = optax.sgd(0.1)

    def make_state() -> Any:
        params = {"table": jnp.zeros((rows, WIDTH))}
        return params, tx.init(params)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        table = params["table"]
        found = shd.lookup(table, ids) if by_rows else jnp.take(zero.gather(table), ids, axis=0)
        return jnp.mean(found**2)

    state = zero.abstract_state(make_state, tx=tx)
    ids = jax.ShapeDtypeStruct((zero.num_devices * lookups,), jnp.int32)
    return zero.train_step(loss, tx=tx).lower(state, ids).compile()


def main() -> None:
    """Prints the tables; writes those of all targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="8 virtual CPU devices; no file")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_num_cpu_devices", 8)
    tables = []
    for header, rows in (
        (SPARSE_HEADER, sparse_rows),
        (TABLE_HEADER, table_rows),
        (LOSSY_HEADER, lossy_rows),
    ):
        tables.append(_results.table(header, rows(smoke)))
    if not smoke:
        about = (
            f"Bytes that one device sends. First a table of V rows of {WIDTH} float32 numbers, of "
            f"which each device has {DENSITY:.0%}, Zipf-distributed; the fullest owner is that of "
            "one device's rows, or of the sum, over the mean; `bound` is the capacity, "
            "1 + root of 2 ln(100 n^2) / the rows that a device has for one owner. Then a step of "
            f"SGD whose loss looks up {LOOKUPS} rows on each device of 2^20, of {WIDTH} float32 "
            "numbers (256 MiB), and nothing else; below stage 3 the new parameters are gathered, "
            "too. Then a matrix of 4096 x 4096, all-reduced (the full mean) and reduce-scattered "
            "(a shard)."
        )
        _results.write("gradient_sync", "Gradient syncs: bytes sent", about, *tables)


if __name__ == "__main__":
    main()
