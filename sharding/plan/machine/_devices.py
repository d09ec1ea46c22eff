"""Figures of accelerators with their sources, and the bytes of arrays in their memory."""

import dataclasses
import itertools
import math
import os
import re
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sharding._types import Tree
from sharding.placement._describe import Description, Row
from sharding.placement._specs import num_shards
from sharding.plan._format import with_article

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """One accelerator, as jax counts devices."""

    name: str  #: what targets call it
    memory: float  #: main memory, in bytes
    bandwidth: float  #: of the main memory, in bytes per second
    flops: float  #: of dense products of bfloat16 matrices, per second
    link: float  #: to its neighbours in one direction, the sum of all links, in bytes per second
    #: its share of its host's network to others, in bytes per second; None where not published
    network: float | None
    source: str  #: where the figures are from
    tile: tuple[int, int] | None = None  #: rows and columns of the tiles of its memory, if any
    #: to its host's memory in one direction, in bytes per second; None where not published
    host_link: float | None = None
    #: its share of the bandwidth of its host's memory, in bytes per second; None where not known
    host_bandwidth: float | None = None
    num_links: int = 1  #: that ``link`` is the sum of: two for each axis of a torus
    node_size: int = 8  #: devices that ``link`` joins by a switch, without a torus
    fp8: float | None = None  #: of dense products of 8-bit floats, per second, if it has them
    int8: float | None = None  #: of those of 8-bit integers, likewise
    #: shares of these figures, where they were measured; None: what is published of its kind
    reached: "Achieved | None" = None

    def rate(self, matmuls: str | None) -> float:
        """Operations of dense products per second: of bfloat16, ``"fp8"`` or ``"int8"``.

        Raises:
          ValueError: the device has no such products, or their rate is not known.
        """
        found: float | None = getattr(self, matmuls or "flops")
        if found is None:
            raise ValueError(
                f"products in {matmuls} are asked for, and {self.name} has none of a known rate: "
                f"leave {matmuls} out, or give a DeviceKind with {matmuls}=."
            )
        return found

    @classmethod
    def read(cls, path: str | os.PathLike[str], dtype: str = "") -> "DeviceKind":
        """The measured figures of a machine, for the ``device`` of plans.

        Args:
          path: of the file that ``optax-ext check --measure`` wrote.
          dtype: of parameters in the loss; by default float32 on CPUs, else bfloat16.

        Raises:
          ValueError: there is no such file, or it has no products of that dtype.

        Example:
          >>> kind = DeviceKind.read("machine.json")  # doctest: +SKIP
          >>> plan = fit(loss_fn, make_state, batch, device=kind)  # doctest: +SKIP
        """
        from sharding.plan.machine._measured_rates import MeasuredRates  # which makes one of these

        return MeasuredRates.read(path).device(dtype)

    @property
    def about(self) -> str:
        """Where its figures are from, in words."""
        kind = "peak" if self.reached is None else "measured"
        return f"the {kind} figures of {with_article(self.name)}"

    def at_least(
        self, flops: float, moved: float, wire: float, network: float = 0.0
    ) -> dict[str, float]:
        """Seconds of a step by what bounds it, of ``wire`` bytes that it sends some over a network.

        All of them may overlap completely.
        """
        slow = network if self.network else 0.0
        bounds = {"compute": flops / self.flops, "memory": moved / self.bandwidth}
        bounds["wire"] = (wire - slow) / self.link
        return bounds | ({"network": slow / self.network} if slow and self.network else {})


# The share of a device's memory that plans leave to its allocator; less is warned of.
HEADROOM = 0.08
_UNITS = {"memory": 1, "bandwidth": 1e9, "flops": 1e12}
_UNITS |= dict.fromkeys(("link", "network", "host_link"), 1e9)
_A100 = "NVIDIA A100 data sheet, SXM; network: of DGX A100, 200 Gb/s a GPU"
_SXM = "NVIDIA's data sheet of the SXM module; network: of DGX systems, 400 Gb/s a GPU"
_ADA = "NVIDIA Ada GPU architecture, appendix A: bfloat16 with float32 sums"
_RTX = "NVIDIA RTX Blackwell GPU architecture, appendix A: bfloat16 with float32 sums"
_PCIE_CARD = "NVIDIA H100 data sheet; the link is PCIe, a bridge joins two GPUs at 300 GB/s"
_DGX_B200 = "NVIDIA DGX B200 data sheet; network: 400 Gb/s a GPU"
_NVL72 = "NVIDIA GB200 NVL72 data sheet; network: 400 Gb/s a GPU; host: half a C2C link"
_AMD = "AMD Instinct MI300X data sheet; link: 7 of 128 GB/s, both directions together"


# Of hosts, GB/s. DGX A100: two EPYC 7742 of 204.8, for 128 cores. DGX H100 and B200: two Xeons with
# 8 channels of DDR5-4800 and 5600. GB200: its data sheet, two GPUs. Of TPUs' hosts cores alone are
# published, half the vCPUs of Google's machine types: each is taken for 3.2, as in DGX A100.
_OF_HOST = {
    **{"a100-40": 2 * 204.8 / 8, "a100-80": 2 * 204.8 / 8, "h100": 2 * 307.2 / 8},
    **{"h200": 2 * 307.2 / 8, "b200": 2 * 358.4 / 8, "gb200": 512 / 2},
    **{"v4": 3.2 * 120 / 4, "v5e": 3.2 * 56 / 4, "v5p": 3.2 * 104 / 4, "v6e": 3.2 * 90 / 4},
}

# Dense products of 8-bit floats, with float32 sums, and of 8-bit integers, in 1e12 per second: the
# same sources; of B200 and GB200 "HGX B200" and "GB200 NVL72", halved, as they are with sparsity.
_IN_8_BITS: dict[str, tuple[float | None, float | None]] = {
    **dict.fromkeys(("a100-40", "a100-80"), (None, 624)),
    **{"l40s": (733, 733), "rtx4090": (330.3, 660.6), "rtx5090": (419, 838)},
    **dict.fromkeys(("h100", "h200"), (1979, 1979)),
    **{"h100-pcie": (1513, 1513), "b200": (4500, 4500), "gb200": (5000, 5000)},
    **{"mi300x": (2614.9, 2614.9), "v4": (None, 275), "v5e": (None, 393), "v5p": (None, 918)},
    **{"v6e": (None, 1836), "tpu7x": (4614 / 2, None)},
}


def _kind(name: str, *figures: float | None, source: str, **others: Any) -> DeviceKind:
    """A kind by figures in the order and the units of ``_UNITS``."""
    pairs = zip(_UNITS.items(), figures, strict=True)
    scaled: dict[str, Any] = {key: value and value * unit for (key, unit), value in pairs}
    others["host_bandwidth"] = _OF_HOST[name] * 1e9 if name in _OF_HOST else None
    others["fp8"], others["int8"] = (x and x * 1e12 for x in _IN_8_BITS[name])
    return DeviceKind(name, **scaled, source=source, **others)


def _tpu_kind(name: str, *figures: float | None, num_links: int) -> DeviceKind:
    page = f"cloud.google.com/tpu/docs/{name}"
    return _kind(name, *figures, source=page, tile=(8, 128), num_links=num_links)


# Makers publish links as the sum of both directions, of which a device sends half, and products of
# GPUs often with sparsity, of which these are half. The memory of h100 and h200 is that which their
# driver reports; of other GPUs it is the maker's figure in units of 1e9 bytes, a lower bound. PCIe
# is the link of GPUs that have no other. Links to hosts are PCIe of 16 lanes, of version 4 or 5 by
# the data sheets; of TPUs they are from Austin et al., How to Scale Your Model, 2025, chapter TPUs.
_KINDS = (
    # Link: 1.1 PB/s of all-reduce for a pod of 4096 chips, which are 6 links of 45 GB/s. Network:
    # Austin et al., How to Scale Your Model, 2025, chapter TPUs.
    _tpu_kind("v4", 32 * _GIB, 1200, 275, 6 * 45, 6.25, 16, num_links=6),
    _tpu_kind("v5e", 16 * _GIB, 819, 197, 400 / 2, 200 / 8 / 8, 16, num_links=4),
    # Network: the table of generations on the page of tpu7x.
    _tpu_kind("v5p", 95 * _GIB, 2765, 459, 1200 / 2, 50 / 8, 16, num_links=6),
    _tpu_kind("v6e", 32 * _GIB, 1640, 918, 800 / 2, 800 / 8 / 8, 32, num_links=4),
    # jax shows a chip as two devices, each with half of it.
    _tpu_kind("tpu7x", 96 * _GIB, 7380 / 2, 2307 / 2, 1200 / 2 / 2, 100 / 8 / 2, None, num_links=6),
    _kind("a100-40", 40e9, 1555, 312, 600 / 2, 200 / 8, 32, source=_A100),
    _kind("a100-80", 80e9, 2039, 312, 600 / 2, 200 / 8, 32, source=_A100),
    _kind("l40s", 48e9, 864, 362.05, 64 / 2, None, 32, source="NVIDIA L40S data sheet"),
    _kind("rtx4090", 24e9, 1008, 165.2, 64 / 2, None, 32, source=_ADA),
    # A quarter of the 838 TFLOPS of float16 with sparsity and float16 sums.
    _kind("rtx5090", 32e9, 1792, 209.5, 128 / 2, None, 64, source=_RTX),
    _kind("h100-pcie", 80e9, 2000, 756, 128 / 2, None, 64, source=_PCIE_CARD),
    _kind("h100", 84_942_979_072, 3352, 989, 900 / 2, 400 / 8, 64, source=_SXM),
    _kind("h200", 150_754_820_096, 4800, 989, 900 / 2, 400 / 8, 64, source=_SXM),
    _kind("b200", 180e9, 8000, 2250, 1800 / 2, 400 / 8, 64, source=_DGX_B200),
    _kind("gb200", 186e9, 8000, 2500, 1800 / 2, 400 / 8, 900 / 2 / 2, source=_NVL72, node_size=72),
    _kind("mi300x", 192e9, 5300, 1307.4, 7 * 128 / 2, None, 64, source=_AMD, num_links=7),
)
KINDS = {kind.name: kind for kind in _KINDS}
# Names of jax and of drivers that differ from the kind's; other forms of these GPUs have other
# figures.
_OTHER_NAMES = {
    **{r"v5 lite": "v5e", r"v5": "v5p", r"v6 lite": "v6e"},
    r"a100-sxm4-(40|80)gb": r"a100-\1",
    r"h100 80gb hbm3": "h100",
    r"h100 pcie": "h100-pcie",
    r"rtx (4090|5090)": r"rtx\1",
}


def kind_of(name: str) -> DeviceKind | None:
    """The kind of a target or a ``jax.Device.device_kind``; None if unknown, as for a CPU.

    >>> kind_of("h200x8").name, kind_of("NVIDIA A100-SXM4-80GB").name, kind_of("cpu:8")
    ('h200', 'a100-80', None)
    """
    text = re.sub(r"^(nvidia |geforce |amd |instinct |tpu )+", "", name.lower())
    for pattern, kind in _OTHER_NAMES.items():
        text = re.sub(f"^{pattern}$", kind, text)
    match = re.fullmatch(rf"({'|'.join(KINDS)})(x\d+|:.*)?", text)
    return KINDS[match[1]] if match else None


@dataclasses.dataclass(frozen=True)
class Achieved:
    """Shares of the peak figures of a ``DeviceKind``, and fixed times in seconds."""

    matmul: float  # of ``flops``, by matrix products, beside reading and writing their operands
    link: float  # of ``link``, by ring collectives of large arrays
    # of ``link``: bytes of the array per second in an all-reduce that a switch sums, if it does
    all_reduce: float | None = None
    # Of ``bandwidth``, by passes over more than 100 MB: Isaev et al., Calculon, SC 2023,
    # systems/a100_80g.json.
    memory: float = 0.90
    passes: float = 0.90  # of ``bandwidth``, by operations on activations
    operands: float | None = None  # of ``bandwidth``, by those of products; None: as ``passes``
    # Of what products reach, by convolutions: of operations, and of bytes of operands.
    convolutions: tuple[float, float] = (1.0, 1.0)
    new_memory: float = 0.0  # seconds of each byte of temporaries that a CPU's pages are new for
    # Seconds of a kernel beside its roofline: what the efficiencies in the same file imply, 0.60 at
    # 1e9 operations, 0.90 at 16e9 and 0.95 at 128e9: 2 to 3 microseconds.
    kernel: float = 3e-6
    # Seconds of any collective, and to the next device or node, and the share of ``network``: the
    # tuning values of H100 in autoparallel of meta-pytorch: all-gathers over 2 to 8 GPUs of a node
    # start in 8 to 30 us, over 2 to 32 nodes in 37 us a node, over one GPU of each of 8 or 32 nodes
    # in 13 us a node, at 48 of 50 GB/s.
    start: float = 0.0
    link_hop: float = 3.8e-6
    network_hop: float = 13.8e-6
    network: float = 0.96
    ramp: float = 0.0  # x bytes take as long as x + sqrt(ramp x) bytes at full speed
    # Of a PCIe link to the host by copies 55 of 63 GB/s: Bekman, Machine Learning Engineering. Of
    # the bandwidth of host memory by CPUs, STREAM on a socket of DGX A100 by 32 threads, 148 of
    # 204.8 GB/s (gist.github.com/v0dro/0559e1d9b205ca9ac0ad1a29fe10377b).
    host_link: float = 0.88
    host_bandwidth: float = 0.72


# Products: near the shares that fit published steps (benchmarks/step_time_model.py --fit), on H100
# between those of two sources, for TPUs up to v5p one: below that of the best shape, 0.87 on A100
# and 0.80 on H100, and of predictable values, which take less power (He, Matrix Multiplications on
# GPUs Run Faster When Given "Predictable" Data, 2024). Others have 0.85 of the best shape's share.
# Links and best shapes: Bekman, Machine Learning Engineering, pages of accelerators and networks;
# A100 also Bang et al., vTrain, MICRO 2024, trace/a100; TPUs as above, chapter TPUs.
# All-gathers of 1 GB over 8 GPUs: 394 GB/s of H100 are 345 by the bytes sent, of 450; all-reduces
# 267 GB/s. A100 sends 229 of 300 in all-reduces of 1 GiB, and starts those of two GPUs in 44 us.
# H200: 366 in a ring, 473 summed by switches, by the bytes of a ring. B200: 846 of 900 at 16 GiB,
# 401 at 64 MiB and 36 at 1 MiB, which determine its ramp. PCIe of 16 lanes: 88 % one way.
_RING = 345 / 450


def _tpu(matmul: float, usable: float, nominal: float) -> Achieved:
    """95 % of a link's usable bandwidth, 1 us a hop, 10 us over the network."""
    link = 0.95 * usable / nominal
    return Achieved(matmul, link, kernel=0.0, link_hop=1e-6, network_hop=10e-6)


_OF_KIND = {
    "v4": _tpu(0.80, 45, 45),
    "v5e": _tpu(0.80, 45, 50),
    "v5p": _tpu(0.80, 90, 100),
    "v6e": _tpu(0.67, 90, 100),
    "tpu7x": _tpu(0.73, 90, 100),
    **dict.fromkeys(("a100-40", "a100-80"), Achieved(0.80, 229 / 300, start=30e-6)),
    "h100": Achieved(0.67, _RING, all_reduce=267 / 450),
    "h200": Achieved(0.67, 366 / 450, all_reduce=473 / 1.75 / 450),
    "b200": Achieved(0.66, _RING, all_reduce=846 / 1.75 / 900, ramp=38e6),
    "gb200": Achieved(0.62, _RING, all_reduce=846 / 1.75 / 900, ramp=38e6),
    "mi300x": Achieved(0.43, _RING),
}


def achieved(device: DeviceKind) -> Achieved:
    """What a kind reaches, as measured if it was; unknown GPUs do what an H100 does, over PCIe."""
    return device.reached or _OF_KIND.get(device.name, Achieved(0.68, 0.88))


def num_bytes(tree: Tree) -> int:
    """Bytes of all arrays of a tree, real or abstract, without tiles."""
    arrays = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def padded_to_tiles(described: Description, tile: tuple[int, int] | None) -> Description:
    """Counts arrays with the bytes that they take in a memory of tiles.

    The compiler makes those two dims innermost that waste least. Few rows take tiles of 1, 2 or 4.
    """
    if tile is None:
        return described
    tile_rows, tile_columns = tile

    def pad(row: Row) -> Row:
        shards = [num_shards(described.mesh, PartitionSpec(entry)) for entry in row.spec]
        shards += [1] * (len(row.shape) - len(shards))
        shape = [size // num for size, num in zip(row.shape, shards, strict=True)]  # of one shard
        if len(shape) < 2 or not all(shape):
            return row

        def waste(second_last: int, last: int) -> float:
            """The factor by which memory grows with these two dims innermost."""
            height = min(tile_rows, 2 ** math.ceil(math.log2(shape[second_last])))
            padded = math.ceil(shape[second_last] / height) * height
            width = math.ceil(shape[last] / tile_columns) * tile_columns
            return padded / shape[second_last] * width / shape[last]

        least = min(waste(*dims) for dims in itertools.permutations(range(len(shape)), 2))
        return dataclasses.replace(row, bytes_per_device=round(row.bytes_per_device * least))

    return dataclasses.replace(described, rows=tuple(map(pad, described.rows)))
