"""Placement of a train state: what ``Zero.describe`` returns, in a short and a long form."""

import dataclasses
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence

import jax
from jax.sharding import PartitionSpec

from sharding._types import Tree
from sharding.placement._specs import AnyMesh, first_names, is_spec, leaf_names, num_shards


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of a train state, or one gradient."""

    part: str  #: ``"params"``, ``"grads"``, ``"opt_state"``, ``"sync"`` or ``"model_state"``
    path: str  #: where it is in its part, such as ``dense/kernel``
    shape: tuple[int, ...]  #: its global shape
    dtype: str  #: its dtype
    spec: PartitionSpec  #: its placement on the mesh
    bytes_per_device: int  #: what one device holds of it, in the memory that ``memory`` names
    #: why a gradient, and at stage 3 a parameter, is not sharded over the data axis; empty where it
    #: is, or the stage does not shard it
    note: str
    memory: str = "device"  #: or ``"host"``


@dataclasses.dataclass(frozen=True)
class Description:
    """The placement of a train state on a mesh, a row per array.

    ``str()`` is the short form: totals, the reasons why arrays are unsharded, and a line for each
    group of like parameters (the same path but for the numbers in it, the same shape, placement and
    reason). ``table()`` is the long form, a line for each array.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sharding as shd
      >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
      >>> tx = optax.adam(1e-3)
      >>> def make_state():
      ...     layer = {"w": jnp.ones((256, 64)), "scale": jnp.ones(64)}
      ...     params = {f"layer_{i}": layer for i in range(12)}
      ...     return params, tx.init(params)
      >>> print(shd.Zero(mesh, stage=2).describe(jax.eval_shape(make_state), tx=tx))
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

    mesh: AnyMesh  #: the mesh
    stage: int  #: the ZeRO stage
    axes: tuple[str, ...]  #: those that are sharded over
    replica_axes: tuple[str, ...]  #: those of replicas
    rows: tuple[Row, ...]  #: the arrays
    batch_rows: str = ""  #: the rows of a batch that this process gives; empty where it gives all
    gather_group: int = 0  #: bytes of the parameters that are gathered at once after an update
    gathered_blocks: tuple[str, ...] = ()  #: layers that gather their own parameters at stage 3
    #: names in Flax metadata that are no axes of the mesh: they shard nothing
    absent_axes: tuple[str, ...] = ()
    #: how the loss of a step runs, per device or partitioned, and why; empty without a batch
    loss_program: str = ""

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
        params = _parameters(self)
        lines = [f"{self._title}: bytes of one device", *_total_lines(self)]
        if self.loss_program:
            lines.append(f"the loss runs {self.loss_program}")
        if self.batch_rows:
            lines.append(f"rows of a batch: {self.batch_rows}")
        if self.stage in (1, 2) and self.bytes_per_device["params"] > self.gather_group:
            group = f"groups of {self.gather_group:,} bytes"
            lines.append(f"updated parameters are gathered in {group}, larger arrays alone")
        if self.gathered_blocks and self.stage < 3:
            lines.append(
                f"gathered_blocks={self.gathered_blocks}: nothing is gathered below stage 3; at "
                "stages 1 and 2 the backward pass reduces gradients of these layers one by one"
            )
        if self.absent_axes:
            names = first_names(map(repr, self.absent_axes))
            lines.append(f"metadata names {names}, which the mesh lacks: they shard nothing")
        return "\n".join([*lines, *_reason_lines(params), *_group_lines(params, self)])

    def table(self) -> str:
        """The long form: a line for each array, and the totals."""
        lines = [("part", "array", "shape", "dtype", "spec", "bytes/device", "")]
        for row in self.rows:
            note = row.note if row.memory == "device" else _HOST
            cells = (row.part, row.path, str(row.shape), row.dtype, str(tuple(row.spec)))
            lines.append((*cells, f"{row.bytes_per_device:,}", note))
        totals = self.bytes_per_device
        if self.host_bytes_per_device:
            totals["host"] = self.host_bytes_per_device
        lines += [(part, "total", "", "", "", f"{size:,}", "") for part, size in totals.items()]
        return "\n".join([self._title, *_aligned(lines, numbers={5})])

    @property
    def _title(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        over = "+".join(self.axes)
        if self.replica_axes:
            over += f", replicas over {'+'.join(self.replica_axes)},"
        return f"ZeRO stage {self.stage} over {over} on the mesh ({mesh})"


def describe_tree(
    part: str,
    tree: Tree,
    specs: Tree,
    mesh: AnyMesh,
    notes: Sequence[str] | None = None,
    params: Tree = None,
) -> list[Row]:
    """A row per array of a tree; of state with the names of ``params``."""
    leaves, specs = jax.tree.leaves(tree), jax.tree.leaves(specs, is_leaf=is_spec)
    names = leaf_names(tree, params)
    notes = notes or [""] * len(leaves)
    rows = []
    for name, x, spec, note in zip(names, leaves, specs, notes, strict=True):
        size = math.prod(x.shape) * x.dtype.itemsize // num_shards(mesh, spec)
        rows.append(Row(part, name, tuple(x.shape), str(x.dtype), spec, size, note))
    return rows


_HOST = "in host memory"


@dataclasses.dataclass
class _Parameter:
    """A parameter with all that belongs to it; bytes of one device by part."""

    path: str
    row: Row
    spec: PartitionSpec
    sizes: Counter[str]
    host: bool = False

    @property
    def pattern(self) -> str:
        """Its path without the numbers, such as those of layers."""
        return re.sub(r"\d+", "*", self.path)


def _total_lines(description: Description) -> list[str]:
    unsharded: dict[str, int] = defaultdict(int)
    for row in description.rows:
        unsharded[row.part] += row.bytes_per_device * num_shards(description.mesh, row.spec)
    on_device = description.bytes_per_device
    sizes = [(part, on_device[part], full) for part, full in unsharded.items()]
    sizes.append(("total", sum(on_device.values()), sum(unsharded.values())))
    lines = [
        (f"  {part}", f"{size:,}", *(("of", f"{full:,}", "unsharded") if size < full else [""] * 3))
        for part, size, full in sizes
    ]
    if description.host_bytes_per_device:
        lines.append(("  host memory", f"{description.host_bytes_per_device:,}", "", "", ""))
    return _aligned(lines, numbers={1, 3})


def _parameters(description: Description) -> list[_Parameter]:
    """The parameters in their order, then other arrays, each by itself."""
    params: dict[str, _Parameter] = {}
    others = []
    for row in description.rows:
        path = row.path if row.part in ("params", "grads") else None
        if row.part == "opt_state":
            path = _owner(row.path, params)
        if path is None:
            owner = _Parameter(f"{row.part}/{row.path}", row, row.spec, Counter())
            others.append(owner)
        else:
            owner = params.setdefault(path, _Parameter(path, row, row.spec, Counter()))
        owner.sizes[row.part] += row.bytes_per_device
        owner.host |= row.memory == "host"
        if row.note:
            owner.row = dataclasses.replace(owner.row, note=row.note)
        # Of the arrays of its shape, the one over most devices: at stage 1 its optimizer state.
        if row.shape == owner.row.shape:
            owner.spec = max(
                owner.spec, row.spec, key=functools.partial(num_shards, description.mesh)
            )
    return [*params.values(), *others]


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


def _reason_lines(params: Iterable[_Parameter]) -> Iterator[str]:
    """Names, bytes and why, for the parameters that could not be sharded."""
    reasons: dict[str, list[_Parameter]] = defaultdict(list)
    for param in params:
        if param.row.note:
            reasons[param.row.note].append(param)
    if reasons:
        yield "left unsharded"
    sizes = {note: sum(p.sizes["grads"] for p in group) for note, group in reasons.items()}
    for note, group in sorted(reasons.items(), key=lambda item: -sizes[item[0]]):
        shown = first_names(dict.fromkeys(param.pattern for param in group))
        arrays = f"{len(group)} array{'s' if len(group) > 1 else ''}"
        reason = note.removeprefix("unsharded: ")
        yield f"  {shown} ({arrays}, {sizes[note]:,} bytes of gradients): {reason}"


def _group_lines(params: Sequence[_Parameter], description: Description) -> list[str]:
    """A line for each group of parameters that differ in the numbers in their paths alone."""
    groups: dict[tuple[object, ...], list[_Parameter]] = defaultdict(list)
    for param in params:
        row = param.row
        key = (param.pattern, row.shape, row.dtype, param.spec, row.note, param.host)
        groups[key].append(param)
    parts = [part for part in description.bytes_per_device if any(part in p.sizes for p in params)]
    lines = [("parameter", "n", "shape", "dtype", "sharded as", *parts, "")]
    for group in groups.values():
        first, num = group[0], len(group)
        name = first.pattern if num > 1 else first.path
        cells = (name, str(num), str(first.row.shape), first.row.dtype, str(tuple(first.spec)))
        sizes = [sum(param.sizes[part] for param in group) for part in parts]
        note = f"state {_HOST}" if first.host else ""
        lines.append((*cells, *(f"{size:,}" if size else "" for size in sizes), note))
    return _aligned(lines, numbers={1, *range(5, 5 + len(parts))})


def _aligned(lines: Sequence[Sequence[str]], numbers: set[int]) -> list[str]:
    """Cells in columns; those of numbers to the right."""
    columns = []
    for i, column in enumerate(zip(*lines, strict=True)):
        pad = str.rjust if i in numbers else str.ljust
        width = max(map(len, column))
        columns.append([pad(cell, width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
