"""What a machine was measured to do, as a file, and as the figures of a device for plans."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from sharding.plan._format import Printed, Table, check_choice, size
from sharding.plan.machine import targets
from sharding.plan.machine._collective_time import Machine, NodeGroup, collective_seconds
from sharding.plan.machine._devices import Achieved, DeviceKind, kind_of


@dataclasses.dataclass(frozen=True)
class WireTime:
    """One collective over an axis of the mesh, the others beside it."""

    axis: str
    operation: str  # of ``OPERATIONS``
    nbytes: float  # as ``collective_seconds`` counts them
    seconds: float


@dataclasses.dataclass(frozen=True)
class MeasuredRates(Printed):
    """Rates of a machine with all of its devices at work; printed, tables of them.

    Attributes:
      target: the name of the machine, as plans have it.
      about: versions and devices, as of ``MachineReport``.
      memory: bytes of a device.
      kernel: seconds of a kernel that does next to nothing.
      passes: bytes that a pass over memory reads and writes, and its seconds; by size.
      elementwise: planned bytes a second of the element-wise operations of a layer.
      products: of square matrices by dtype: rows, and the mean of the seconds of one and of the two
        that its gradient takes.
      convolutions: of 3 x 3 filters by dtype: operations, bytes of operands, and such a mean.
      wire: collectives by axis of the mesh, operation and size.
      host_link: bytes a second to and from the host's memory; None where that is none of its own.
      new_memory: seconds of each byte of temporaries, where programs get them from the system.
    """

    target: str
    about: Mapping[str, Any]
    memory: float
    kernel: float
    passes: Sequence[tuple[float, float]]
    elementwise: float
    products: Mapping[str, Sequence[tuple[int, float]]]
    wire: Sequence[WireTime]
    host_link: float | None = None
    convolutions: Mapping[str, Sequence[tuple[float, float, float]]] = dataclasses.field(
        default_factory=dict
    )
    new_memory: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Of the memory, in bytes a second, by the largest pass."""
        nbytes, seconds = self.passes[-1]
        return nbytes / seconds

    def device(self, dtype: str = "") -> DeviceKind:
        """The figures for plans: rates of products of this dtype, links by all collectives.

        Of n x n matrices a product takes 2 n^3 / F + 3 n^2 b / O + kernel for elements of b bytes;
        F and O are fitted, by relative errors; likewise those of convolutions, which take what
        products do where a file has none. A collective takes ``start + x / link`` where it takes x
        seconds over links of 1 byte a second without latency.

        Args:
          dtype: of the parameters in the loss; by default float32 on CPUs, else bfloat16.

        Raises:
          ValueError: the products of that dtype were not measured.
        """
        target = targets.parse(self.target, other_gpus=True)
        dtype = dtype or ("float32" if target.kind == "cpu" else "bfloat16")
        check_choice("a dtype of measured products", dtype, [*self.products])
        n, seconds = np.array(self.products[dtype]).T
        terms = np.stack([2 * n**3, 3 * n**2 * jnp.dtype(dtype).itemsize], 1)
        flop, byte = _fitted(terms, seconds - self.kernel, seconds)
        convolutions = 1.0, 1.0
        if dtype in self.convolutions:
            *images, seconds = np.array(self.convolutions[dtype]).T
            found = _fitted(np.stack(images, 1), seconds - self.kernel, seconds)
            convolutions = float(flop / found[0]), float(byte / found[1])
        known = kind_of(self.target) or DeviceKind(
            *(target.kind, self.memory, 0.0, 0.0, 1.0, None),
            source="",
            node_size=target.num_devices // target.groups,
        )
        near, far = self._links(target, known)
        reached = Achieved(
            *(1.0, 1.0, near[2]),
            memory=1.0,
            passes=self.elementwise / self.bandwidth,
            operands=1 / float(byte) / self.bandwidth,
            convolutions=convolutions,
            new_memory=self.new_memory,
            kernel=self.kernel,
            start=near[1],
            link_hop=0.0,
            network_hop=far[1],
            network=1.0,
            host_link=1.0,
        )
        return dataclasses.replace(
            known,
            memory=self.memory,
            bandwidth=self.bandwidth,
            flops=1 / float(flop),
            link=near[0],
            network=far[0] if target.groups > 1 else known.network,
            host_link=self.host_link or known.host_link,
            source=f"measured by optax-ext check, jax {self.about.get('jax')}",
            reached=reached,
        )

    def _links(
        self, target: targets.Target, known: DeviceKind
    ) -> tuple[tuple[float, float, float | None], tuple[float, float]]:
        """Of links and of the network: bytes a second, and seconds of a start or hop.

        With them the share of a link at which a switch sums, if it does.
        """
        # Every byte takes a second of the kind of link that is fitted, and none of the other.
        machine = Machine(known, target.num_devices)
        if target.is_torus:
            machine = dataclasses.replace(machine, torus=target.shape, slices=target.groups)
        axes = target.mesh_axes
        groups = dict(zip(reversed(axes), machine.groups((*axes.values(),)[::-1]), strict=True))
        near: list[tuple[float, float]] = []
        far: list[tuple[float, float]] = []
        summed = 0.0
        for row in self.wire:
            group = groups[row.axis]
            crosses = group.nodes > 1 if isinstance(group, NodeGroup) else group.slices > 1
            unit = dataclasses.replace(known, link=1e30 if crosses else 1.0, network=1.0)
            operation: Any = row.operation
            x = collective_seconds(operation, row.nbytes, group, unit, ideal=True)
            if row.operation == "all-reduce" and not crosses and not target.is_torus:
                summed = max(summed, row.nbytes / row.seconds)
            else:
                (far if crosses else near).append((x, row.seconds))
        link, start = _line(near, known.link)
        return (link, start, summed / link if summed else None), _line(far, known.network or 1.0)

    def tables(self) -> list[Table]:
        """What was measured."""
        about = ", ".join(f"{key} {value}" for key, value in self.about.items() if value)
        rows: list[tuple[str, ...]] = [("memory of a device", "", size(self.memory), "")]
        rows += [("a kernel", "", "", f"{1e6 * self.kernel:.1f}")]
        if self.host_link:
            rows += [("link to the host", "", f"{self.host_link / 1e9:.3g} GB/s", "")]
        for nbytes, seconds in self.passes:
            rows += [_rate_row("a pass over memory", size(nbytes), nbytes, "GB/s", seconds)]
        rows += [("element-wise operations", "", f"{self.elementwise / 1e9:.3g} GB/s", "")]
        if self.new_memory:
            rows += [("new memory", "", f"{1 / self.new_memory / 1e9:.3g} GB/s", "")]
        for dtype, found in self.products.items():
            for n, seconds in found:
                flops = 2.0 * n**3 / 1e3
                rows += [_rate_row(f"products in {dtype}", f"{n} x {n}", flops, "TFLOP/s", seconds)]
        for dtype, images in self.convolutions.items():
            for flops, nbytes, seconds in images:
                name = f"convolutions in {dtype}"
                rows += [_rate_row(name, size(nbytes), flops / 1e3, "TFLOP/s", seconds)]
        for wire in self.wire:
            name = f"{wire.operation} over {wire.axis}"
            rows += [_rate_row(name, size(wire.nbytes), wire.nbytes, "GB/s", wire.seconds)]
        return [Table(about, ("measured", "size", "rate", "us"), rows)]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for ``read``."""
        pathlib.Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "MeasuredRates":
        """What ``write`` wrote.

        Raises:
          ValueError: the file cannot be read, or is of something else.
        """
        try:
            found = json.loads(pathlib.Path(path).read_text())
            found["wire"] = [WireTime(**row) for row in found["wire"]]
            return cls(**found)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is no file that optax-ext check --measure wrote: {error}."
            ) from None


def _rate_row(name: str, of: str, amount: float, unit: str, seconds: float) -> tuple[str, ...]:
    return name, of, f"{amount / seconds / 1e9:.3g} {unit}", f"{1e6 * seconds:.1f}"


def _fitted(terms: Any, rest: Any, seconds: Any) -> np.ndarray:
    """Positive factors of terms whose sum is nearest to ``rest``, by shares of ``seconds``."""
    found, _ = nnls(terms / seconds[:, None], rest / seconds)
    return np.maximum(found, 1e-30)


def _line(rows: Sequence[tuple[float, float]], known: float) -> tuple[float, float]:
    """Bytes a second, and seconds of a start, of (bytes, seconds); without rows what is known."""
    if not rows:
        return known, 0.0
    nbytes, seconds = np.array(rows).T
    each, start = _fitted(np.stack([nbytes, np.ones_like(nbytes)], 1), seconds, seconds)
    return float(1 / each), float(start)
