"""Reduce-scatter in several forms, as compilers for accelerators compile each.

Every number is read from the program that the target's compiler made; nothing is run. The TPU
targets need libtpu, the GPU target jax's CUDA plugin.

  python benchmarks/scatter_forms.py            # prints the tables, writes benchmarks/results/
  python benchmarks/scatter_forms.py --smoke    # 8 virtual CPU devices, prints only
"""

import argparse
import math
from collections.abc import Iterator

import _results
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.collectives._reduce_scatter import FORMS, choose_form, psum_scatter
from sharding.plan import targets
from sharding.plan.audit._program_collectives import Collective, collectives

MIB = 2**20
TARGETS = {  # target -> its logical meshes
    "v5e:2x4": [(8,), (2, 4)],
    "v5e:4x4": [(16,), (4, 4)],
    "v5e:8x8": [(64,), (8, 8)],
    "v6e:16x16": [(256,), (16, 16)],
    "v5p:4x4x4": [(64,), (4, 4, 4)],
    "v5e:4x4*2": [(2, 16), (2, 4, 4)],
    "h200x8": [(8,)],
}
HEADER = """\
| target | mesh | dim | dtype | form | collectives | wire, MiB | / theory | temp, MiB | steps | us |
|---|---|---|---|---|---|---|---|---|---|---|"""
NOTES = """\
Bytes that one device sends, in the ring convention; theory is (n-1)/n of the array and, for two
slices (`*2`, the first mesh axis), an all-reduce of the shard across them. **Bold** is the choice
of `choose_form`. The sharded "dim" is the first, a middle one, or the last. "Steps" is how many
collectives wait for one another (a ring's two directions run at the same time). "us" is the
compiler's own estimate (`cost_analysis`), which sees a loop's body once and so says nothing about a
ring; none is given for GPUs. Temporaries in a TPU's fast memory are not in "temp". Nothing was run.

- GPU: `native` is a reduce-scatter of the theoretical bytes in one step; nothing to gain.
- TPU, the mesh has the axes of the torus: `axes` sends the theoretical bytes in as many collectives
  as axes. Sharding the leading dim (dim 0) avoids padding by the compiler.
- TPU, one flat axis: `native` is mostly a full all-reduce, twice the bytes. `ring` and `all_to_all`
  send the theoretical bytes. The ring sends nbytes/n a step, half each way, needs no memory and
  takes n-1 latencies; so below 64 KiB a step (a choice, not a measurement) it is `all_to_all`: one
  step, with memory for the full array. Where the torus has several axes, prefer the mesh that has
  them.
- v5e:2x4, one flat axis: `native` is a real reduce-scatter for this shape, but not for every shape,
  so the rule does not rely on it."""


def compile_form(
    mesh: Mesh, form: str, dtype: str, shape: tuple[int, ...], dim: int, slices: int
) -> tuple[list[Collective], float, str]:
    """The collectives, temporary MiB and estimated us of one reduce-scatter."""
    inner = mesh.axis_names[1:] if slices > 1 else mesh.axis_names

    def scatter(x: jax.Array) -> jax.Array:
        x = psum_scatter(x[0], inner, dim, form)
        return (lax.psum(x, mesh.axis_names[0]) if slices > 1 else x)[None]

    spec = P(mesh.axis_names)
    x = jax.ShapeDtypeStruct((mesh.size, *shape), dtype, sharding=NamedSharding(mesh, spec))
    step = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=spec, out_specs=spec))
    compiled = step.lower(x).compile()
    seconds = (compiled.cost_analysis() or {}).get("optimal_seconds", 0.0)
    estimate = f"{1e6 * seconds:.0f}" if seconds > 0 and form != "ring" else "-"
    return collectives(compiled), compiled.memory_analysis().temp_size_in_bytes / MIB, estimate


def describe(found: list[Collective]) -> str:
    """The collectives; equal ones once, with their number."""
    names = [
        f"{'slices: ' if each.across_slices else ''}{each.op} of {each.group_size}"
        + (f" x {each.runs}" if each.runs > 1 else "")
        for each in found
    ]
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{num} {name}" if num > 1 else name for name, num in counts.items())


def in_sequence(found: list[Collective]) -> int:
    """How many collectives wait for one another; those of one loop run at the same time."""
    loops = {each.runs for each in found if each.runs > 1}
    return sum(loops) + sum(each.runs == 1 for each in found)


def cases(size: int, sizes: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], int, str]]:
    """Sharded dim, shape, dim, dtype; dims other than the first where they matter."""
    for dtype in ("float32", "bfloat16"):
        yield "first", (size, size), 0, dtype
    if len(sizes) > 1:
        yield "middle", (4, size, size // 4), 1, "bfloat16"
        yield "last", (size, size), 1, "bfloat16"


def rows(target: str, size: int) -> Iterator[str]:
    """The table's lines for one target."""
    slices = 2 if target.endswith("*2") else 1
    for mesh_shape in TARGETS.get(target, [(8,), (2, 4)]):
        mesh = targets.mesh(target, mesh_shape, ("a", "b", "c")[: len(mesh_shape)])
        sizes = mesh_shape[1:] if slices > 1 else mesh_shape
        num = math.prod(sizes)
        for name, shape, dim, dtype in cases(size, sizes):
            nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
            theory = (num - 1) / num * nbytes + 2 * (slices - 1) / slices * nbytes / num
            chosen = choose_form(mesh.devices.flat[0].platform, sizes, shape, dim, dtype)
            for form in FORMS:
                if form == "axes" and len(sizes) == 1:
                    continue
                found, temp, estimate = compile_form(mesh, form, dtype, shape, dim, slices)
                wire = sum(each.wire_bytes for each in found)
                yield (
                    f"| {target} | {'x'.join(map(str, mesh_shape))} | {name} | {dtype} "
                    f"| {f'**{form}**' if form == chosen else form} | {describe(found)} "
                    f"| {wire / MIB:.2f} | {wire / theory:.3f} | {temp:.1f} "
                    f"| {in_sequence(found)} | {estimate} |"
                )


def main() -> None:
    """Prints the table; writes that of the accelerators."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="8 virtual CPU devices; no file")
    smoke = parser.parse_args().smoke
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    names, size = (["cpu:8"], 256) if smoke else (TARGETS, 4096)
    table = _results.table(HEADER, (line for name in names for line in rows(name, size)))
    if not smoke:
        title, about = "Forms of the reduce-scatter", "4096 x 4096 elements per device."
        _results.write("scatter_forms", title, about, table, NOTES)


if __name__ == "__main__":
    main()
