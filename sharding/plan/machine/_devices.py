"""Peak figures of accelerators, with the makers' pages they are from."""

import dataclasses
import re

_GIB, _GIGA, _TERA = 2**30, 1e9, 1e12
_SLOW_HOST, _FAST_HOST = 16e9, 32e9
_TPU, _TILE = "cloud.google.com/tpu/docs/", (8, 128)
_AMPERE = "NVIDIA A100 data sheet, SXM; network: of DGX A100, 200 Gb/s a GPU"
_GPU = "NVIDIA's data sheet of the SXM module; network: of DGX systems, 400 Gb/s a GPU"


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """One accelerator, as jax counts devices.

    Attributes:
      name: what targets call it.
      memory: main memory, in bytes.
      bandwidth: of the main memory, in bytes per second.
      flops: of dense products of bfloat16 matrices, per second.
      link: to its neighbours in one direction, the sum of all links, in bytes per second.
      network: its share of its host's network to other hosts or slices, in bytes per second; None
        where the maker does not publish it.
      source: where the figures are from.
      tile: rows and columns of the tiles of its memory; None where arrays are dense.
      host_link: between its memory and that of its host in one direction, in bytes per second; None
        where it is not published.
      num_links: links of equal bandwidth that ``link`` is the sum of: two for each axis of a torus,
        one where a switch joins the devices of a node.
      node_size: devices of a node that are joined by ``link``; a TPU slice is a torus instead.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    network: float | None
    source: str
    tile: tuple[int, int] | None = None
    host_link: float | None = None
    num_links: int = 1
    node_size: int = 8

    @property
    def one_link(self) -> float:
        """Bytes per second over one of its links, in one direction."""
        return self.link / self.num_links


def _gpu(
    name: str,
    *figures: float,
    network: float | None = None,
    source: str,
    host: float,
    num_links: int = 1,
    node_size: int = 8,
) -> DeviceKind:
    memory, bandwidth, tflops, link = figures
    return DeviceKind(
        *(name, memory * _GIGA, bandwidth * _GIGA, tflops * _TERA, link * _GIGA, network, source),
        host_link=host * _GIGA,
        num_links=num_links,
        node_size=node_size,
    )


# Makers publish links as the sum of both directions, of which a device sends half, and products of
# GPUs often with sparsity, of which these are half. The memory of h100 and h200 is that which their
# driver reports; of other GPUs it is the maker's figure in units of 1e9 bytes, a lower bound. PCIe
# is the link of GPUs that have no other. Links to hosts are PCIe of 16 lanes, of version 4 or 5 by
# the data sheets; of TPUs they are from Austin et al., How to Scale Your Model, 2025, chapter TPUs.
KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind(
            # Link: 1.1 PB/s of all-reduce for a pod of 4096 chips, which are 6 links of 45 GB/s.
            # Network: Austin et al., How to Scale Your Model, 2025, chapter TPUs.
            *(
                "v4",
                32 * _GIB,
                1200e9,
                275 * _TERA,
                6 * 45e9,
                6.25e9,
                _TPU + "v4",
                _TILE,
                _SLOW_HOST,
                6,
            )
        ),
        DeviceKind(
            *("v5e", 16 * _GIB, 819e9, 197 * _TERA, 400e9 / 2, 200e9 / 8 / 8, _TPU + "v5e", _TILE),
            host_link=_SLOW_HOST,
            num_links=4,
        ),
        DeviceKind(
            # Network: the table of generations on the page of tpu7x.
            *("v5p", 95 * _GIB, 2765e9, 459 * _TERA, 1200e9 / 2, 50e9 / 8, _TPU + "v5p", _TILE),
            host_link=_SLOW_HOST,
            num_links=6,
        ),
        DeviceKind(
            *("v6e", 32 * _GIB, 1640e9, 918 * _TERA, 800e9 / 2, 800e9 / 8 / 8, _TPU + "v6e", _TILE),
            host_link=_FAST_HOST,
            num_links=4,
        ),
        DeviceKind(
            # jax shows a chip as two devices, each with half of it.
            "tpu7x",
            192 * _GIB / 2,
            7380e9 / 2,
            2307 * _TERA / 2,
            1200e9 / 2 / 2,
            100e9 / 8 / 2,
            _TPU + "tpu7x",
            _TILE,
            num_links=6,
        ),
        _gpu("a100-40", 40, 1555, 312, 600 / 2, network=200e9 / 8, source=_AMPERE, host=32),
        _gpu("a100-80", 80, 2039, 312, 600 / 2, network=200e9 / 8, source=_AMPERE, host=32),
        _gpu("l40s", 48, 864, 362.05, 64 / 2, source="NVIDIA L40S data sheet", host=32),
        _gpu(
            *("rtx4090", 24, 1008, 165.2, 64 / 2),
            source="NVIDIA Ada GPU architecture, appendix A: bfloat16 with float32 sums",
            host=32,
        ),
        _gpu(
            # A quarter of the 838 TFLOPS of float16 with sparsity and float16 sums.
            *("rtx5090", 32, 1792, 209.5, 128 / 2),
            source="NVIDIA RTX Blackwell GPU architecture, appendix A: bfloat16 with float32 sums",
            host=64,
        ),
        _gpu(
            *("h100-pcie", 80, 2000, 756, 128 / 2),
            source="NVIDIA H100 data sheet; the link is PCIe, a bridge joins two GPUs at 300 GB/s",
            host=64,
        ),
        DeviceKind(
            *("h100", 84_942_979_072, 3352e9, 989 * _TERA, 900e9 / 2, 400e9 / 8, _GPU),
            host_link=64e9,
        ),
        DeviceKind(
            *("h200", 150_754_820_096, 4800e9, 989 * _TERA, 900e9 / 2, 400e9 / 8, _GPU),
            host_link=64e9,
        ),
        _gpu(
            *("b200", 180, 8000, 2250, 1800 / 2),
            network=400e9 / 8,
            source="NVIDIA DGX B200 data sheet; network: 400 Gb/s a GPU",
            host=64,
        ),
        _gpu(
            *("gb200", 186, 8000, 2500, 1800 / 2),
            network=400e9 / 8,
            source="NVIDIA GB200 NVL72 data sheet; network: 400 Gb/s a GPU; host: half a C2C link",
            host=900 / 2 / 2,
            node_size=72,
        ),
        _gpu(
            *("mi300x", 192, 5300, 1307.4, 7 * 128 / 2),
            source="AMD Instinct MI300X data sheet; link: 7 of 128 GB/s, both directions together",
            host=64,
            num_links=7,
        ),
    )
}
_OF_JAX = {
    "tpu v4": "v4",
    "tpu v5 lite": "v5e",
    "tpu v5": "v5p",
    "tpu v6 lite": "v6e",
    "tpu7x": "tpu7x",
}
# Drivers' names that differ from the kind's; other forms of these GPUs have other figures.
_OF_DRIVERS = {
    r"a100-sxm4-(40|80)gb": r"a100-\1",
    r"h100 80gb hbm3": "h100",
    r"h100 pcie": "h100-pcie",
    r"rtx (4090|5090)": r"rtx\1",
}


def kind_of(name: str) -> DeviceKind | None:
    """The kind of a target such as ``"v5e:4x4"``, or of a ``jax.Device.device_kind``.

    None where its figures are unknown, as for a CPU.

    >>> kind_of("h200x8").name, kind_of("NVIDIA A100-SXM4-80GB").name, kind_of("cpu:8")
    ('h200', 'a100-80', None)
    """
    text = _OF_JAX.get(name.lower(), name.lower())
    text = re.sub(r"^(nvidia |geforce |amd |instinct |tpu )+", "", text)
    for pattern, kind in _OF_DRIVERS.items():
        text = re.sub(f"^{pattern}$", kind, text)
    found = re.fullmatch(rf"({'|'.join(KINDS)})(x\d+|:.*)?", text)
    return KINDS[found[1]] if found else None
