"""Which devices and processes share a machine, and what processes tell each other."""

import dataclasses
import functools
import json
import pathlib
import socket
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
# By machine: the machines that store its shards, itself first.
Holders = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Machines:
    """The machines of a mesh, numbered in the order of the mesh."""

    names: tuple[str, ...]  # of each machine
    domains: tuple[str, ...]  # the failure domain of each machine
    of_device: np.ndarray  # the machine of each device, in the order of the mesh. [devices]
    of_process: tuple[int, ...]  # the machine of each process
    holders: Holders = ()  # once they are chosen

    @functools.cached_property
    def devices(self) -> np.ndarray:
        """Places of each machine's devices in the mesh: [machines, devices of one]."""
        return np.argsort(self.of_device, kind="stable").reshape(len(self.names), -1)


def gather_json(value: Any) -> list[Any]:
    """Gathers a value of all processes, by their index; a collective."""
    raw = json.dumps(value).encode()
    if jax.process_count() == 1:
        return [json.loads(raw)]
    sizes = np.asarray(multihost_utils.process_allgather(np.int64(len(raw)))).reshape(-1)
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: len(raw)] = np.frombuffer(raw, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))  # [processes, longest]
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def this_machine() -> str:
    """Names this machine by its kernel's boot, which all containers on it share."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def is_compile_only(mesh: Mesh) -> bool:
    device = mesh.devices.flat[0]
    try:
        return device not in jax.devices(device.platform)
    except RuntimeError:  # no such platform here
        return True


def find_machines(mesh: Mesh, machine: str | None, domain: str | None) -> Machines:
    """Asks all processes for the names and failure domains of their machines; a collective."""
    if is_compile_only(mesh):
        hosts = [(f"host {device.process_index}",) * 2 for device in mesh.devices.flat]
        return machines_of(hosts, sorted(set(hosts)))
    name = machine or this_machine()
    answers = gather_json([name, domain or name])
    processes = [device.process_index for device in mesh.devices.flat]
    if sorted(set(processes)) != list(range(jax.process_count())):
        raise ValueError(
            f"PeerCheckpoints needs a mesh with devices of all {jax.process_count()} processes, "
            f"got one with devices of {sorted(set(processes))}."
        )
    return machines_of([answers[p] for p in processes], answers)


def machines_of(
    by_device: Sequence[tuple[str, str]], by_process: Sequence[tuple[str, str]]
) -> Machines:
    """Machines from pairs of name and failure domain, by device and by process."""
    names = tuple(dict.fromkeys(name for name, _ in by_device))
    numbers = {name: i for i, name in enumerate(names)}
    domains = dict(by_process)
    for name, domain in by_process:
        if domains[name] != domain:
            raise ValueError(
                f"machine {name!r} is in two failure domains, {domain!r} and {domains[name]!r}: "
                "give the same failure_domain in all of its processes."
            )
    of_device = np.array([numbers[name] for name, _ in by_device])
    counts = np.bincount(of_device)
    if len(set(counts.tolist())) > 1:
        few, many = names[counts.argmin()], names[counts.argmax()]
        raise ValueError(
            f"machine {few!r} has {counts.min()} devices of the mesh, machine {many!r} has "
            f"{counts.max()}: PeerCheckpoints needs as many of each."
        )
    of_process = tuple(numbers[name] for name, _ in by_process)
    return Machines(names, tuple(domains[name] for name in names), of_device, of_process)
