"""What lies where: the table that ``Zero.describe`` returns."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sharding._specs import AnyMesh, num_shards, path_str


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of a train state, or one gradient.

    Attributes:
      part: ``"params"``, ``"grads"`` or ``"opt_state"``.
      path: where it is in its part, such as ``dense/kernel``.
      shape: its global shape.
      dtype: its dtype.
      spec: how it lies on the mesh.
      bytes_per_device: what one device holds of it, in bytes; in the host's memory where ``memory``
        says so.
      note: why it is not cut over the data axis; empty where it is, or was not to be.
      memory: ``"device"`` or ``"host"``.
    """

    part: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes_per_device: int
    note: str
    memory: str = "device"


@dataclasses.dataclass(frozen=True)
class Description:
    """What lies where on a mesh, a row per array; ``str()`` makes a table of it.

    Attributes:
      mesh: the mesh.
      stage: the ZeRO stage.
      axes: the axes that are cut over.
      replica_axes: the axes of copies.
      rows: the arrays.
    """

    mesh: AnyMesh
    stage: int
    axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes in a device's memory of each part: ``params``, ``grads`` and ``opt_state``.

        ``grads`` is what the stage keeps; until it is reduced, a gradient is whole. ``sync``, what
        an exchange of gradients keeps, is there if there is such.
        """
        total = dict.fromkeys(("params", "grads", "opt_state"), 0)
        total |= {row.part: 0 for row in self.rows if row.part not in total}
        for row in self.rows:
            total[row.part] += row.bytes_per_device if row.memory == "device" else 0
        return total

    @property
    def host_bytes_per_device(self) -> int:
        """Bytes that are in the host's memory for each of its devices."""
        return sum(row.bytes_per_device for row in self.rows if row.memory == "host")

    @property
    def fallbacks(self) -> tuple[Row, ...]:
        """The rows of arrays that stay whole though the stage would cut them."""
        return tuple(row for row in self.rows if row.note)

    def __str__(self) -> str:
        """A table of all rows, and the sums."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        over = "+".join(self.axes)
        if self.replica_axes:
            over += f", copies over {'+'.join(self.replica_axes)},"
        lines = [f"ZeRO stage {self.stage} over {over} on the mesh ({mesh})"]
        table = [("part", "array", "shape", "dtype", "spec", "bytes/device", "")]
        table += [
            (
                row.part,
                row.path,
                str(row.shape),
                row.dtype,
                str(tuple(row.spec)),
                f"{row.bytes_per_device:,}",
                "in host memory" if row.memory == "host" else row.note,
            )
            for row in self.rows
        ]
        table += [
            (part, "total", "", "", "", f"{size:,}", "")
            for part, size in self.bytes_per_device.items()
        ]
        if self.host_bytes_per_device:
            table.append(("host", "total", "", "", "", f"{self.host_bytes_per_device:,}", ""))
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        for line in table:
            cells = [
                cell.rjust(width) if i == 5 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def describe_tree(
    part: str, tree: Any, specs: Any, mesh: AnyMesh, notes: Sequence[str] | None = None
) -> list[Row]:
    """A row per array of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    rows = []
    for (path, leaf), spec, note in zip(
        leaves, flat_specs, notes or [""] * len(leaves), strict=True
    ):
        shape = tuple(leaf.shape)
        size = math.prod(shape) * leaf.dtype.itemsize // num_shards(mesh, spec)
        rows.append(Row(part, path_str(path), shape, str(leaf.dtype), spec, size, note))
    return rows
