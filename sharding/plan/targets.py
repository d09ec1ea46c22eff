"""Compile-only devices: programs for accelerators that are not here.

A program compiled for them can be read (its collectives, its memory) but not run. TPU targets need
the ``libtpu`` package, GPU targets the CUDA plugin of jax. Set ``JAX_PLATFORMS=cpu`` in a process
that only compiles, so that jax does not look for the accelerators themselves.
"""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

# How one device per chip is asked for, where that is not the default.
_TPUS: dict[str, dict[str, str]] = {
    "v4": {"chip_config_name": "megacore"},
    "v5e": {},
    "v5p": {},
    "v6e": {},
    "tpu7x": {},
}
_GPU_MEMORY = {  # bytes, and bytes per second
    "h100": (84_942_979_072, 3_352_320_000_000),
    "h200": (150_754_820_096, 4_800_000_000_000),
}
_GPUS_PER_HOST = 8
_KNOWN = (
    "v4:2x2x2, v5e:4x4, v5p:4x4x4, v6e:16x16, tpu7x:2x2x1 (a TPU slice; its shape may differ), "
    "v5e:4x4*2 (two slices), h100x8, h200x8, h200x16 (GPUs, 8 to a host), cpu:8"
)


def topology(name: str) -> list[jax.Device]:
    """The devices of a target, for compiling only (those of ``cpu:n`` run too).

    Args:
      name: generation and shape of a TPU slice, ``"v5e:4x4"``; of several, ``"v5e:4x4*2"``; kind
        and number of GPUs, ``"h200x8"``; or a number of virtual CPU devices, ``"cpu:8"``.

    Returns:
      The devices, in jax's order. ``mesh`` puts them into an order that suits their links.

    Raises:
      ValueError: the target is unknown, or what compiles for it is not installed.

    >>> [device.platform for device in topology("cpu:1")]
    ['cpu']
    """
    if match := re.fullmatch(r"cpu:([1-9]\d*)", name):
        return _cpus(name, int(match[1]))
    gpus = "|".join(_GPU_MEMORY)
    if match := re.fullmatch(rf"({gpus})x([1-9]\d*)", name):
        return _gpus(name, match[1], int(match[2]))
    tpus = "|".join(_TPUS)
    if match := re.fullmatch(rf"({tpus}):(\d+(?:x\d+)*)(?:\*([1-9]\d*))?", name):
        return _tpus(name, match[1], match[2], int(match[3] or 1))
    raise ValueError(f"unknown target {name!r}; known are {_KNOWN}")


def mesh(name: str, shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """A mesh of Auto axes over a target, in a device order that suits its links.

    Over several slices the first axis runs across them, and its size is a multiple of their number.

    Args:
      name: the target, as in ``topology``.
      shape: the size of each mesh axis; the product is the number of devices.
      axis_names: the name of each mesh axis.

    Raises:
      ValueError: as ``topology``; or the shape does not fit the devices.

    >>> mesh("cpu:1", (1,), ("data",)).axis_names
    ('data',)
    """
    devices = topology(name)
    shape = tuple(shape)
    if math.prod(shape) != len(devices):
        raise ValueError(f"mesh shape {shape} asked for {name!r}, which has {len(devices)} devices")
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if devices[0].platform != "tpu":
        grid = np.array(devices).reshape(shape)
    elif slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    elif shape[0] % slices:
        raise ValueError(
            f"mesh shape {shape} asked for {name!r}: the first axis must be a multiple of the "
            f"{slices} slices"
        )
    else:
        grid = mesh_utils.create_hybrid_device_mesh(
            (shape[0] // slices, *shape[1:]),
            (slices, *[1] * (len(shape) - 1)),
            devices,
            allow_split_physical_axes=True,
        )
    return Mesh(grid, tuple(axis_names), axis_types=(AxisType.Auto,) * len(shape))


def _cpus(name: str, num: int) -> list[jax.Device]:
    devices = jax.devices("cpu")
    if len(devices) < num:
        raise ValueError(
            f"{name!r} asked for, {len(devices)} CPU devices found; set "
            f"jax.config.update('jax_num_cpu_devices', {num}) before jax is first used"
        )
    return devices[:num]


def _tpus(name: str, generation: str, shape: str, slices: int) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"{name!r} needs the TPU compiler, which is not installed: pip install libtpu"
        )
    # Nothing is asked of a metadata server, and two processes may compile at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options: dict[str, Any] = {**_TPUS[generation]}
    if slices > 1:
        options["num_slices"] = slices
    try:
        found = topologies.get_topology_desc(f"{generation}:{shape}", "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the TPU compiler does not know {name!r}: {error}") from error
    return found.devices


def _gpus(name: str, kind: str, num: int) -> list[jax.Device]:
    if num > _GPUS_PER_HOST and num % _GPUS_PER_HOST:
        raise ValueError(f"{name!r}: more GPUs than one host's must be a multiple of 8")
    local = min(num, _GPUS_PER_HOST)
    try:
        found = topologies.get_topology_desc(
            name, "cuda", target_config=_gpu_config(kind), topology=f"1x{num // local}x{local}"
        )
    except NotImplementedError as error:
        version = jax.__version__
        raise ValueError(
            f"{name!r} needs jax's CUDA plugin, which is not found: pip install "
            f"jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} (--no-deps is enough to "
            "compile)"
        ) from error
    return found.devices


def _gpu_config(kind: str) -> str:
    """What XLA is told about a Hopper GPU, as the text of its GpuTargetConfigProto."""
    memory, bandwidth = _GPU_MEMORY[kind]
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        shared_memory_per_block: 49152 shared_memory_per_core: 233472
        shared_memory_per_block_optin: 232448
        core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: 52428800
        cuda_compute_capability {{ major: 9 }}
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "NVIDIA {kind.upper()}"
    """
