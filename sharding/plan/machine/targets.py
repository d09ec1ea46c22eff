"""Compile-only targets: programs for accelerators that this machine does not have.

A program compiled for a target can be read (its collectives, its memory) but not run. TPU targets
need the ``libtpu`` package, GPU targets the CUDA plugin of jax: ``pip install '.[aot]'`` in a
checkout. Set ``JAX_PLATFORMS=cpu`` in a process that only compiles, so that jax looks for no
accelerators; the command ``optax-ext`` does so by itself.

Where jax finds these packages and no accelerator, every script that starts it waits some 20 seconds
and prints a traceback, unless ``JAX_PLATFORMS=cpu`` is set. To avoid that, install them into a
folder that only this module reads, with the same version of jax:
``pip install --target DIR 'jax[tpu,cuda13-local]'`` and ``SHARDING_COMPILERS=DIR``.
"""

import importlib.util
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from sharding.plan._format import nearest
from sharding.plan.machine._devices import KINDS

__all__ = ["Target", "mesh", "parse", "topology"]
__dir__ = __all__.copy

# Options of the topology that make one device per chip, where that is not the default.
_TPUS: dict[str, dict[str, str]] = {
    "v4": {"chip_config_name": "megacore"},
    **{kind: {} for kind in ("v5e", "v5p", "v6e", "tpu7x")},
}
_GPUS = ("h100", "h200")
# GPUs that can be planned for; XLA lacks the figures to compile for them.
_PLANNED = tuple(kind for kind in KINDS if kind not in _TPUS and kind not in _GPUS)
_CORES = {"tpu7x": 2}  # devices of a chip
# Single slices, by the pages of Google Cloud; those of v5p are the usual ones of many.
_SQUARES = [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
_SHAPES = {"v5e": _SQUARES, "v6e": _SQUARES}
_HOW = "pip install '.[aot]' in a checkout (docs: start/install)"
_FORMS = "v5e:4x4 (a TPU slice), v5e:4x4*2 (two slices), h100x8 (GPUs) or cpu:8"


class Target(NamedTuple):
    """A target, parsed from its name."""

    kind: str  # "v5e", "h200", "cpu" ...
    shape: tuple[int, ...]  # the torus of one TPU slice; elsewhere the number of devices
    groups: int  # how many TPU slices or hosts of GPUs there are

    @property
    def num_devices(self) -> int:
        """The devices of all slices."""
        slices = self.groups if self.kind in _TPUS else 1
        return math.prod(self.shape) * slices * _CORES.get(self.kind, 1)

    @property
    def is_torus(self) -> bool:
        """Whether its devices are in a torus; else a switch joins those of a node."""
        return self.kind in _TPUS

    @property
    def compiles(self) -> bool:
        """Whether programs can be compiled for it here; else it can be planned only."""
        return self.kind in ("cpu", *_TPUS, *_GPUS)

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Axes that suit its links: those of the torus, after one of slices or hosts."""
        outer = "host"
        inner = {"data": self.shape[0] // self.groups}
        if self.is_torus:
            named = zip("xyz", self.shape, strict=False)
            outer = "slice"
            inner = {name: n for name, n in named if n > 1} or {"x": 1}
        inner |= {"core": _CORES[self.kind]} if self.kind in _CORES else {}
        return {outer: self.groups, **inner} if self.groups > 1 else inner


def parse(name: str, *, other_gpus: bool = False) -> Target:
    """The target of a name, as ``topology`` has it; no compiler needs to be installed.

    If ``other_gpus``, GPUs may be of any other kind, ``"NAMExNUMBER"``.

    Raises:
      ValueError: the name is unknown, or there is no TPU slice of that shape.

    >>> parse("v5e:4x4*2").mesh_axes
    {'slice': 2, 'x': 4, 'y': 4}
    """
    if any(len(number) > 7 for number in re.findall(r"\d+", name)):
        raise ValueError(f"{name!r} has more than 10 million devices.")
    if re.search(r"[:*x]0+(?!\d)", name):
        raise ValueError(
            f"{name!r} has no devices: give each number as 1 or more (docs: reference/devices)."
        )
    if match := re.fullmatch(r"cpu:([1-9]\d*)", name):
        return Target("cpu", (int(match[1]),), 1)
    if match := re.fullmatch(r"([a-z][\w.-]*?)x([1-9]\d*)", name):
        kind = match[1]
        num = int(match[2])
        if other_gpus or kind in (*_GPUS, *_PLANNED):
            host = KINDS[kind].node_size if kind in KINDS else 8
            if num > host and num % host:
                several = f"more GPUs than one host's must be a multiple of {host}"
                raise ValueError(f"{name!r}: {several}.")
            return Target(kind, (num,), max(1, num // host))
    tpus = rf"({'|'.join(_TPUS)}):([1-9]\d*(?:x[1-9]\d*){{0,2}})(?:\*([1-9]\d*))?"
    if match := re.fullmatch(tpus, name):
        shape = tuple(int(size) for size in match[2].split("x"))
        if shape not in _SHAPES.get(match[1], [shape]):
            known = ", ".join("x".join(map(str, sizes)) for sizes in _SHAPES[match[1]])
            raise ValueError(f"there is no slice {name!r}; those of {match[1]} are {known}.")
        if match[1] not in _SHAPES and len(shape) != 3:
            three = f"those of {match[1]} have three sizes, as {match[1]}:4x4x4"
            raise ValueError(f"there is no slice {name!r}; {three}.")
        return Target(match[1], shape, int(match[3] or 1))
    word = re.split("[:*]|x[0-9]", name)[0]
    what = "; the devices are missing" if name in KINDS else nearest(word, ["cpu", *KINDS])
    raise ValueError(f"unknown target {name!r}{what}. Targets look like {_FORMS}.")


def topology(name: str) -> list[jax.Device]:
    """The devices of a target in jax's order, for compiling only (those of ``cpu:n`` run too).

    ``name`` is generation and shape of a TPU slice, ``"v5e:4x4"``; of several, ``"v5e:4x4*2"``;
    kind and number of GPUs, ``"h200x8"``; or a number of virtual CPU devices, ``"cpu:8"``.

    Raises:
      ValueError: the target is unknown, or its compiler is not installed.

    >>> [device.platform for device in topology("cpu:1")]
    ['cpu']
    """
    target = parse(name)
    if target.kind == "cpu":
        devices = jax.devices("cpu")
        num = target.num_devices
        if len(devices) < num:
            raise ValueError(
                f"{name!r} was requested, {len(devices)} CPU devices were found; set "
                f"jax.config.update('jax_num_cpu_devices', {num}) before jax is first used."
            )
        return devices[:num]
    if not target.compiles:
        raise ValueError(
            f"{name!r} can be planned, not compiled for; targets to compile for are CPUs, TPUs "
            f"({', '.join(_TPUS)}) and GPUs ({', '.join(_GPUS)})."
        )
    folders = os.environ.get("SHARDING_COMPILERS", "").split(os.pathsep)
    sys.path.extend(folder for folder in folders if folder and folder not in sys.path)
    return _gpus(name, target) if target.kind in _GPUS else _tpus(name, target)


def mesh(name: str, shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """A mesh of Auto axes over the devices of the target ``name``, ordered to suit its links.

    Over several slices the first axis runs across them, and its size is a multiple of their number.

    Raises:
      ValueError: as ``topology``; or the shape does not fit the devices.

    >>> mesh("cpu:1", (1,), ("data",)).axis_names
    ('data',)
    """
    devices = topology(name)
    shape = tuple(shape)
    if math.prod(shape) != len(devices):
        number = f"{len(devices)} devices"
        raise ValueError(f"mesh shape {shape} does not fit {name!r}, which has {number}.")
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if devices[0].platform != "tpu":
        grid = np.array(devices).reshape(shape)
    elif slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    elif shape[0] % slices:
        raise ValueError(
            f"mesh shape {shape} does not fit {name!r}: the first axis must be a multiple of the "
            f"{slices} slices."
        )
    else:
        sizes = (shape[0] // slices, *shape[1:]), (slices, *[1] * (len(shape) - 1))
        grid = mesh_utils.create_hybrid_device_mesh(*sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(axis_names), axis_types=(AxisType.Auto,) * len(shape))


def _tpus(name: str, target: Target) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"{name!r} needs the TPU compiler, which is not installed: {_HOW}.")
    # No query of a metadata server; two processes may compile at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options: dict[str, Any] = {**_TPUS[target.kind]}
    if target.groups > 1:
        options["num_slices"] = target.groups
    if math.prod(target.shape) == 1:  # libtpu 0.0.42, which jax 0.10.2 takes, expects hosts of four
        options["chips_per_host_bounds"] = (1, 1, 1)
    shape = "x".join(map(str, target.shape))
    try:
        return topologies.get_topology_desc(f"{target.kind}:{shape}", "tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the TPU compiler does not know {name!r}: {error}.") from error


def _gpus(name: str, target: Target) -> list[jax.Device]:
    layout = f"1x{target.groups}x{target.num_devices // target.groups}"
    options = {"target_config": _gpu_config(target.kind), "topology": layout}
    try:
        return topologies.get_topology_desc(name, "cuda", **options).devices
    except NotImplementedError as error:
        raise ValueError(
            f"{name!r} needs jax's CUDA plugin, which is not found: {_HOW}; one in "
            "SHARDING_COMPILERS is seen only before jax is first used."
        ) from error


def _gpu_config(kind: str) -> str:
    """A Hopper GPU for XLA, as the text of its GpuTargetConfigProto."""
    figures = KINDS[kind]
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        shared_memory_per_block: 49152 shared_memory_per_core: 233472
        shared_memory_per_block_optin: 232448
        core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        memory_bandwidth: {figures.bandwidth:.0f} device_memory_size: {figures.memory:.0f}
        l2_cache_size: 52428800
        cuda_compute_capability {{ major: 9 }}
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "NVIDIA {kind.upper()}"
    """
