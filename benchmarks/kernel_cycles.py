"""Cycles of steps with 8-bit state on TPUs, of the kernel and of XLA's form, by their schedules.

Static cycles: the instruction bundles of every loop of a compiled program, times its trips. A TPU
core starts one bundle a cycle, so that this is the time of a step that never waits for memory; the
time for its bytes at the chip's bandwidth is beside it, and a step takes at least the longer one.
Nothing runs, and nothing says how well a chip overlaps the two. Needs the compiler for TPUs:
pip install '.[aot]'.

  python benchmarks/kernel_cycles.py            # writes benchmarks/results/kernel_cycles.md
  python benchmarks/kernel_cycles.py --smoke    # counts the bundles of an example, prints only
"""

import argparse
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _results
import jax
import optax
from _pallas_bytes import calls, moved
from _steps import cost, lowered, step_of

import optax_ext
from optax_ext import kernels
from optax_ext.low_precision._tile_kernel import _SLICE

SHAPES = {"7B: 4096 x 11008": (4096, 11008), "GPT-2: 50257 x 768": (50257, 768)}
OPTIMIZERS = {
    "adamw, stochastic": (optax.adamw(1e-3), {}),
    "adamw, nearest": (optax.adamw(1e-3), {"rounding": "nearest"}),
    "adamw, fp8 stochastic": (optax.adamw(1e-3), {"bits": optax_ext.Float8(expand=False)}),
    "lion, stochastic": (optax.lion(1e-3), {}),
    "lion, nearest": (optax.lion(1e-3), {"rounding": "nearest"}),
}
KERNEL = "low_precision_step"


class Chip(NamedTuple):
    """Cycles and bytes a second."""

    clock: float
    bandwidth: float


ABOUT = """
Schedule: bundles of all loops times their trips, for 1,024 parameters; a bundle starts each cycle.
Bytes: cycles that the audited bytes take at the chip's bandwidth (v5e: 1.5 GHz, 819 GB/s; v6e: 1.75
GHz, which is its peak over the size of its matrix units, and 1,640 GB/s). A step takes at least the
longer one. XLA's estimate is the sum of the cycles that it writes beside each operation of its
form, which is what its own decisions rest on; it has none for kernels. Nothing was run: stalls, the
overlap of arithmetic and copies, and the time to start an operation are in no schedule.
"""
CHIPS = {"v5e:1x1": Chip(1.5e9, 819e9), "v6e:1x1": Chip(1.75e9, 1640e9)}


# --- Bundles --------------------------------------------------------------------------------------

# An address, a label of control flow, the depth of loops, the instructions.
_BUNDLE = re.compile(r" *(?:0x)?[0-9a-f]+ +(?:([A-Z]{2}) *)?: *(>*) *\{(.*)")
_EXIT = re.compile(r"scmp\.ge\.[su]32\.totalorder \S+, (\d+) /\* loop exit test")


def cycles(text: str, unknown: float = 1) -> float:
    """The cycles of a schedule of final bundles, if no bundle waits and no branch is taken.

    Loops count from 0 to a bound. Those that are pipelined have up to two trips more, to fill and
    to drain. The longest one whose bound is not a number has ``unknown`` trips, others (copies that
    are not aligned) one.
    """
    bundles = [x for x in map(_BUNDLE.match, text.splitlines()) if x]
    heads = [x[1] == "LB" for x in bundles]
    depths = [len(x[2]) for x in bundles]
    # Empty bundles, and those that begin what follows the loop, are in it if it goes on after them.
    for i in range(len(bundles) - 1, 0, -1):
        depths[i - 1] = max(depths[i - 1], depths[i] - heads[i])

    # Each loop's enclosing loop, trips and bundles; the first is the program.
    parents, trips, counts = [0], [1.0], [0]
    nest = [0]
    for bundle, is_head, depth in zip(bundles, heads, depths, strict=True):
        del nest[depth + (not is_head) :]
        if is_head:
            parents.append(nest[-1])
            nest.append(len(trips))
            trips.append(0)
            counts.append(0)
        counts[nest[-1]] += 1
        if found := _EXIT.search(bundle[3]):
            trips[nest[-1]] = int(found[1])
    inside = list(counts)  # with those of inner loops
    for i in range(len(parents) - 1, 0, -1):
        inside[parents[i]] += inside[i]
    longest = max(range(len(counts)), key=lambda i: inside[i] * (trips[i] == 0))
    for i, parent in enumerate(parents[1:], 1):
        trips[i] = (trips[i] or (unknown if i == longest else 1)) * trips[parent]
    return sum(n * count for n, count in zip(trips, counts, strict=True))


def program_cycles(folder: pathlib.Path, unknown: float) -> float:
    """The cycles of a program by its dump; operations that are equal share a schedule.

    ``unknown`` are the trips of a kernel's loop whose bound is not a number.
    """
    (map_file,) = folder.glob("*-deduplication-map.txt")
    shared = re.findall(
        r"key:(\S+)\nordinal:\d+\nequivalent_hlos\[size=(\d+)\]", map_file.read_text()
    )
    times = {name: max(1, int(count)) for name, count in shared}
    total = 0.0
    for path in folder.glob("*-final_bundles.txt"):
        name = re.fullmatch(r"\d+-(.+)-\d+-final_bundles.txt", path.name)
        if name and name[1] in times:
            trips = unknown if name[1].startswith(KERNEL) else 1
            total += times[name[1]] * cycles(path.read_text(), trips)
    return total


# --- Programs -------------------------------------------------------------------------------------


class NoKernels(kernels.Shards):
    """Parameters whose shards no kernel takes: XLA's form."""

    def shape_of(self, path: kernels.Path, shape: kernels.Dims) -> None:
        """None: unknown."""


def transformation(optimizer: str) -> optax.GradientTransformation:
    """AdamW or Lion with its state in 8 bits."""
    inner, options = OPTIMIZERS[optimizer]
    return optax_ext.low_precision_state(inner, **options)


def compile_one(target: str, optimizer: str, shape: str, form: str) -> None:
    """Compiles a step; prints XLA's estimate of its cycles, and bytes per parameter."""
    shards = NoKernels() if form == "xla" else kernels.Shards()
    with kernels.kernels_on(shards):
        program = lowered(target, transformation(optimizer), [SHAPES[shape]]).compile()
    estimated = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', program.as_text())))
    print(estimated, cost(program, [SHAPES[shape]])[0])


def kernel_of(optimizer: str, shape: str) -> Any:
    """The call of the kernel in a step."""
    tx, params = (
        transformation(optimizer),
        [jax.ShapeDtypeStruct(SHAPES[shape], "float32")],
    )
    (call,) = calls(step_of(tx), params, jax.eval_shape(tx.init, params), params)
    return call


def trips_of_slices(call: Any) -> float:
    """The mean trips of a kernel's loops over slices whose bounds depend on the tile."""
    tiles = next(x for x in call.params["grid_mapping"].block_mappings if len(x.block_shape) == 3)
    dims = zip(tiles.array_aval.shape[1:], tiles.block_shape[1:], _SLICE, strict=True)
    return math.prod(
        math.ceil(n / size) / math.ceil(n / tile.block_size)
        for n, tile, size in dims
        if n > tile.block_size and n % tile.block_size
    )


class Step(NamedTuple):
    """Cycles by schedule, XLA's estimate of them, and bytes, each for 1,024 parameters."""

    cycles: float
    estimated: float
    nbytes: float


def measured(target: str, optimizer: str, shape: str, form: str) -> Step:
    """Compiles a step in a process of its own, for which the compiler writes its schedules."""
    unknown = trips_of_slices(kernel_of(optimizer, shape)) if form == "kernel" else 1.0
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true"
        out = subprocess.run(
            [sys.executable, __file__, "--case", target, optimizer, shape, form],
            env=os.environ | {"LIBTPU_INIT_ARGS": flags, "TPU_SKIP_MDS_QUERY": "1"},
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ).stdout
        estimated, nbytes = map(float, out.split()[-2:])
        per = math.prod(SHAPES[shape]) / 1024
        found = program_cycles(pathlib.Path(folder), unknown)
    return Step(found / per, estimated / per, 1024 * nbytes)


def table(target: str) -> str:
    """A row for each optimizer and matrix."""
    chip = CHIPS[target]

    def memory(step: Step) -> float:
        return step.nbytes / chip.bandwidth * chip.clock

    def rows() -> Iterator[str]:
        for optimizer in OPTIMIZERS:
            for shape, dims in SHAPES.items():
                kernel, xla = (measured(target, optimizer, shape, f) for f in ("kernel", "xla"))
                counted = sum(moved(kernel_of(optimizer, shape))) / math.prod(dims)
                slowest = max(xla.cycles, memory(xla))
                cells = [
                    f"{kernel.cycles:.0f}, {memory(kernel):.0f}",
                    f"{xla.cycles:.0f}, {memory(xla):.0f}",
                    f"{xla.estimated:.0f}",
                    f"{max(kernel.cycles, memory(kernel)) / slowest:.2f}",
                    f"{kernel.cycles / xla.estimated:.2f}",
                    f"{counted:.2f}",
                    f"{kernel.nbytes / 1024:.2f}",
                    f"{xla.nbytes / 1024:.1f}",
                ]
                yield f"| {optimizer} | {shape} | {' | '.join(cells)} |"

    return _results.table(
        "| optimizer | matrix | kernel: schedule, bytes | XLA: schedule, bytes | XLA's estimate "
        "| ratio of the longer ones | kernel / estimate | bytes, counted from the grid "
        "| bytes, audit | bytes of XLA's form |\n|---|---|---|---|---|---|---|---|---|---|",
        rows(),
    )


EXAMPLE = """
   0x1   :  { %s1 = smov.u32 0 }
   0x2 LB: > { %v2 = vld [vmem:[%s3] sm:$0xff] }
   0x3   :  {}
   0x4 LB: >> { %p1 = scmp.ge.s32.totalorder %s9, 32 /* loop exit test */  ;;  %s2 = smov.u32 1 }
   0x5   : > { %s5 = smov.u32 (%p1), 1 }
   0x6   : >> { %v2 = vadd.f32 %v1, %v1 }
   0x7   : > { %p2 = scmp.ge.s32.totalorder %s4, 10 /* loop exit test */ }
"""


def main() -> None:
    """Prints the tables; writes those of full size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="no compiler; no file")
    parser.add_argument("--case", nargs=4, metavar="NAME", help="one program, for a process")
    arguments = parser.parse_args()
    if arguments.case:
        compile_one(*arguments.case)
        return
    if arguments.smoke:
        print(cycles(EXAMPLE))
        return
    parts = []
    for target in CHIPS:
        parts += [f"Cycles for 1,024 parameters on {target}", table(target)]
    _results.write(
        "kernel_cycles", "Static cycles of steps with 8-bit state", " ".join(ABOUT.split()), *parts
    )


if __name__ == "__main__":
    main()
