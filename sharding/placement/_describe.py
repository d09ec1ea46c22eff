"""Placement of a train state: what ``Zero.describe`` returns, in a short and a long form."""

import dataclasses
import math
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sharding.placement._specs import AnyMesh, leaf_names, num_shards

_NAMED = 4  # parameters that a reason names


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of a train state, or one gradient.

    Attributes:
      part: ``"params"``, ``"grads"`` or ``"opt_state"``.
      path: where it is in its part, such as ``dense/kernel``.
      shape: its global shape.
      dtype: its dtype.
      spec: its placement on the mesh.
      bytes_per_device: what one device holds of it, in bytes; in the host's memory where ``memory``
        says so.
      note: why a gradient, and at stage 3 a parameter, is not sharded over the data axis; empty
        where it is, or the stage does not shard it.
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
    """The placement of a train state on a mesh, a row per array.

    ``str()`` is the short form: totals, the reasons why arrays are unsharded, and a line for each
    group of like parameters (the same path but for the numbers in it, the same shape, placement and
    reason). ``table()`` is the long form, a line for each array.

    Attributes:
      mesh: the mesh.
      stage: the ZeRO stage.
      axes: the axes that are sharded over.
      replica_axes: the axes of replicas.
      rows: the arrays.
      batch_rows: which rows of a batch this process gives; empty where one process gives all.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sharding as shd
      >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
      >>> tx = optax.adam(1e-3)
      >>> def make_state():
      ...     layer = {"w": jnp.ones((256, 64)), "scale": jnp.ones(64)}
      ...     params = {f"layer_{i}": layer for i in range(12)}
      ...     return params, tx.init(params)
      >>> found = shd.Zero(mesh, stage=2).describe(jax.eval_shape(make_state), tx=tx)
      >>> print(found)
      ZeRO stage 2 over data on the mesh (data=8): bytes of one device
        params       789,504
        grads        101,376  of    789,504  unsharded
        opt_state    202,756  of  1,579,012  unsharded
        total      1,093,636  of  3,158,020  unsharded
      left unsharded
        layer_*/scale (12 arrays, 3,072 bytes of gradients): 64 elements, min_shard_size is 4096
      parameter           n  shape      dtype    sharded as   params   grads  opt_state
      layer_*/scale      12  (64,)      float32  ()            3,072   3,072      6,144
      layer_*/w          12  (256, 64)  float32  ('data',)   786,432  98,304    196,608
      opt_state/0/count   1  ()         int32    ()                                   4
    """

    mesh: AnyMesh
    stage: int
    axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    rows: tuple[Row, ...]
    batch_rows: str = ""

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes in a device's memory of each part: ``params``, ``grads`` and ``opt_state``.

        ``grads`` is what the stage stores; before they are reduced, gradients are unsharded. A
        stateful gradient sync adds ``sync``.
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
        """The rows of gradients that stay unsharded though the stage would shard them."""
        return tuple(row for row in self.rows if row.note and row.part == "grads")

    def __str__(self) -> str:
        """The short form."""
        return "\n".join([f"{self._title}: bytes of one device", *_short_form(self)])

    def table(self) -> str:
        """The long form: a line for each array, and the totals."""
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
        return "\n".join([self._title, *_aligned(table, numbers={5})])

    @property
    def _title(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        over = "+".join(self.axes)
        if self.replica_axes:
            over += f", replicas over {'+'.join(self.replica_axes)},"
        return f"ZeRO stage {self.stage} over {over} on the mesh ({mesh})"


def describe_tree(
    part: str,
    tree: Any,
    specs: Any,
    mesh: AnyMesh,
    notes: Sequence[str] | None = None,
    params: Any = None,
) -> list[Row]:
    """A row per array of a tree; of state with the names of ``params``."""
    names, leaves = leaf_names(tree, params), jax.tree.leaves(tree)
    flat_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    rows = []
    for name, leaf, spec, note in zip(
        names, leaves, flat_specs, notes or [""] * len(leaves), strict=True
    ):
        shape = tuple(leaf.shape)
        size = math.prod(shape) * leaf.dtype.itemsize // num_shards(mesh, spec)
        rows.append(Row(part, name, shape, str(leaf.dtype), spec, size, note))
    return rows


# --- The short form -------------------------------------------------------------------------------


@dataclasses.dataclass
class _Parameter:
    """A parameter with all that belongs to it; bytes of one device by part."""

    path: str
    row: Row
    spec: PartitionSpec
    sizes: dict[str, int]
    host: bool = False

    @property
    def pattern(self) -> str:
        """Its path without the numbers, such as those of layers."""
        return re.sub(r"\d+", "*", self.path)

    @property
    def key(self) -> tuple[Any, ...]:
        """What like parameters have in common."""
        row = self.row
        return (self.pattern, row.shape, row.dtype, self.spec, row.note, self.host)


def _short_form(found: Description) -> Iterator[str]:
    total: dict[str, tuple[int, int]] = {}
    for row in found.rows:
        held, full = total.get(row.part, (0, 0))
        size = row.bytes_per_device if row.memory == "device" else 0
        array = row.bytes_per_device * num_shards(found.mesh, row.spec)
        total[row.part] = (held + size, full + array)
    everything = (sum(held for held, _ in total.values()), sum(full for _, full in total.values()))
    lines = []
    for part, (held, full) in [*total.items(), ("total", everything)]:
        beside = ("of", f"{full:,}", "unsharded") if held < full else ("", "", "")
        lines.append((f"  {part}", f"{held:,}", *beside))
    if found.host_bytes_per_device:
        lines.append(("  host memory", f"{found.host_bytes_per_device:,}", "", "", ""))
    yield from _aligned(lines, numbers={1, 3})
    if found.batch_rows:
        yield f"rows of a batch: {found.batch_rows}"
    params = list(_parameters(found))
    yield from _reasons(params)
    yield from _group_lines(params, found)


def _parameters(found: Description) -> Iterator[_Parameter]:
    """The parameters in their order, then other arrays, each by itself."""
    params: dict[str, _Parameter] = {}
    others = []
    for row in found.rows:
        path = row.path if row.part in ("params", "grads") else _owner(row.path, params)
        if path is None or row.part not in ("params", "grads", "opt_state"):
            path, owner = None, _Parameter(f"{row.part}/{row.path}", row, row.spec, {})
            others.append(owner)
        else:
            owner = params.setdefault(path, _Parameter(path, row, row.spec, {}))
        owner.sizes[row.part] = owner.sizes.get(row.part, 0) + row.bytes_per_device
        owner.host |= row.memory == "host"
        if row.note:
            owner.row = dataclasses.replace(owner.row, note=row.note)
        # Of the arrays of its shape, the one over most devices: at stage 1 its optimizer state.
        if row.shape == owner.row.shape:
            owner.spec = max(owner.spec, row.spec, key=lambda spec: num_shards(found.mesh, spec))
    return iter([*params.values(), *others])


def _owner(path: str, params: Container[str]) -> str | None:
    """The parameter whose path a path of the optimizer state contains, the longest at the end."""
    names = path.split("/")
    for end in range(len(names), 0, -1):
        for start in range(end):
            name = "/".join(names[start:end])
            # A number inside is the place in a chain, or of a list.
            if name in params and (end == len(names) or not name.isdigit()):
                return name
    return None


def _reasons(params: Sequence[_Parameter]) -> Iterator[str]:
    """Of the parameters that could not be sharded: names, bytes and why."""
    reasons: dict[str, list[_Parameter]] = {}
    for each in params:
        if each.row.note:
            reasons.setdefault(each.row.note, []).append(each)
    if reasons:
        yield "left unsharded"
    for note, group in sorted(reasons.items(), key=lambda item: -_gradients(item[1])):
        names = list(dict.fromkeys(each.pattern for each in group))
        shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        arrays = f"{len(group)} array{'s' if len(group) > 1 else ''}"
        sums = f"({arrays}, {_gradients(group):,} bytes of gradients)"
        yield f"  {shown} {sums}: {note.removeprefix('unsharded: ')}"


def _gradients(params: Sequence[_Parameter]) -> int:
    return sum(each.sizes.get("grads", 0) for each in params)


def _group_lines(params: Sequence[_Parameter], found: Description) -> Iterator[str]:
    groups: dict[tuple[Any, ...], list[_Parameter]] = {}
    for each in params:
        groups.setdefault(each.key, []).append(each)
    parts = [part for part in found.bytes_per_device if any(part in p.sizes for p in params)]
    lines = [("parameter", "n", "shape", "dtype", "sharded as", *parts, "")]
    for (pattern, shape, dtype, spec, _, host), group in groups.items():
        sums = [sum(each.sizes.get(part, 0) for each in group) for part in parts]
        lines.append(
            (
                pattern if len(group) > 1 else group[0].path,
                str(len(group)),
                str(shape),
                dtype,
                str(tuple(spec)),
                *(f"{size:,}" if size else "" for size in sums),
                "state in host memory" if host else "",
            )
        )
    yield from _aligned(lines, numbers={1, *range(5, 5 + len(parts))})


def _aligned(lines: Sequence[Sequence[str]], numbers: set[int]) -> list[str]:
    """Cells in columns; those of numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
