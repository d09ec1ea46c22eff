"""What accelerators can do at best: figures of their makers, with the pages they are from."""

import dataclasses
import re

_GIB, _TERA = 2**30, 1e12
_TPU, _TILE = "cloud.google.com/tpu/docs/", (8, 128)
_GPU = "NVIDIA's data sheet of the SXM module; network: of DGX systems, 400 Gb/s a GPU"


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """One accelerator, as jax counts devices.

    Attributes:
      name: what targets call it.
      memory: main memory, in bytes.
      bandwidth: of the main memory, in bytes per second.
      flops: of dense products of bfloat16 matrices, per second.
      link: what it sends to its neighbours at best, all links together, in bytes per second.
      network: its share of what its host sends to other hosts or slices, in bytes per second; None
        where the maker's pages do not say.
      source: where the figures are from.
      tile: rows and columns of the tiles that arrays fill in its memory; None where they lie close.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    network: float | None
    source: str
    tile: tuple[int, int] | None = None


# Makers give links as both ways together, of which a device sends half. The memory of GPUs is what
# their driver reports.
KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind(
            "v5e", 16 * _GIB, 819e9, 197 * _TERA, 400e9 / 2, 200e9 / 8 / 8, _TPU + "v5e", _TILE
        ),
        DeviceKind("v5p", 95 * _GIB, 2765e9, 459 * _TERA, 1200e9 / 2, None, _TPU + "v5p", _TILE),
        DeviceKind(
            "v6e", 32 * _GIB, 1640e9, 918 * _TERA, 800e9 / 2, 800e9 / 8 / 8, _TPU + "v6e", _TILE
        ),
        DeviceKind("h100", 84_942_979_072, 3352e9, 989 * _TERA, 900e9 / 2, 400e9 / 8, _GPU),
        DeviceKind("h200", 150_754_820_096, 4800e9, 989 * _TERA, 900e9 / 2, 400e9 / 8, _GPU),
    )
}
_OF_JAX = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}


def kind_of(name: str) -> DeviceKind | None:
    """The kind of a target such as ``"v5e:4x4"``, or of a ``jax.Device.device_kind``.

    None where its figures are not known, as for a CPU: they have to be given.
    """
    found = re.match(r"(?:nvidia |tpu )?(h\d+|v\d+[a-z])", _OF_JAX.get(name, name).lower())
    return KINDS.get(found[1]) if found else None
