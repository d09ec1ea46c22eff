"""The machine that a step is fitted to: its name, its figures, its memory and its meshes."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from sharding._zero import Zero
from sharding.plan._format import nearest, read_size
from sharding.plan.machine import targets
from sharding.plan.machine._devices import KINDS, DeviceKind, kind_of


class FitMachine(NamedTuple):
    """A machine, and what a step may take of it."""

    target: str  # its name
    devices: int
    kind: DeviceKind  # its figures, with the memory that this process has
    usable: float  # bytes of a device
    runs: bool  # whether steps can run: it is this machine

    @classmethod
    def of(
        cls,
        target: str | None,
        device: DeviceKind | None,
        memory: float | str | None,
        headroom: float,
        zero: Zero | None,
    ) -> "FitMachine":
        memory = None if memory is None else read_size(memory, "memory: ")
        if target is not None and targets.parse(target, other_gpus=True).compiles:
            targets.topology(target)  # before jax is used
        devices = [*zero.mesh.devices.flat] if zero else jax.devices()
        name = machine_name(devices) if target is None else target
        parsed = targets.parse(name, other_gpus=True)
        kind = device or kind_of(name)
        if kind is None and parsed.kind == "cpu":
            # Figures of a core: times are compared with each other only.
            kind = DeviceKind("cpu", memory or 0.0, 2e10, 1e11, 1e10, None, "none: any CPU")
        if kind is None:
            known = nearest(parsed.kind, list(KINDS))
            raise ValueError(f"fit needs the figures of {name}: give device=, a DeviceKind{known}.")
        if target is None and memory is None:
            memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        kind = dataclasses.replace(kind, memory=memory or kind.memory)
        if not kind.memory > 0:
            raise ValueError(f"fit needs the memory of a device of {name}: give memory= in bytes.")
        runs = {*devices} <= {*jax.devices()} if target is None else parsed.kind == "cpu"
        return cls(name, parsed.num_devices, kind, (1 - headroom) * kind.memory, runs)

    def mesh(self, axes: Mapping[str, int]) -> Any:
        sizes, auto = tuple(axes.values()), (AxisType.Auto,) * len(axes)
        if self.runs:
            return jax.make_mesh(sizes, tuple(axes), auto, devices=jax.devices()[: self.devices])
        if targets.parse(self.target, other_gpus=True).compiles:
            return targets.mesh(self.target, sizes, tuple(axes))
        return jax.sharding.AbstractMesh(sizes, tuple(axes), auto)


def machine_name(devices: Sequence[jax.Device]) -> str:
    """The name of the machine that devices are."""
    first = devices[0]
    kind = kind_of(first.device_kind)
    name = kind.name if kind else re.sub(r"[^a-z0-9]+", "-", first.device_kind.lower()).strip("-")
    if first.platform == "cpu":
        return f"cpu:{len(devices)}"
    if first.platform != "tpu":
        return f"{name}x{len(devices)}"
    columns: Any = zip(*(device.coords for device in devices), strict=True)
    sizes = [len({*column}) for column in columns]
    sizes = sorted(sizes[:2]) if name in ("v5e", "v6e") else sizes
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    return f"{name}:{'x'.join(map(str, sizes))}" + (f"*{slices}" if slices > 1 else "")
