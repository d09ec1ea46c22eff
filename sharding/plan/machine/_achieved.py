"""What accelerators reach of their peak figures: measured shares and latencies, with sources."""

import dataclasses

from sharding.plan.machine._devices import DeviceKind

# The share of the best matrix product that products of other large shapes reach: a short scan of
# shapes finds 80 to 90 % of the best one (Bekman, Machine Learning Engineering, page "Accelerator
# Benchmarks", quick run of mamf-finder.py); the middle.
TYPICAL_OF_BEST = 0.85
# The share of main memory bandwidth in passes over more than 100 MB: Isaev et al., Calculon, SC
# 2023, systems/a100_80g.json.
_MEMORY = 0.90
# Seconds that a kernel takes beside its roofline: what the efficiencies in the same file imply,
# 0.60 at 1e9 operations, 0.90 at 16e9 and 0.95 at 128e9: 2 to 3 microseconds.
_KERNEL = 3e-6
# Seconds of a hop, and the share of the network: the tuning values of H100 in autoparallel of
# meta-pytorch: all-gathers over 2 to 8 GPUs of a node start in 8 to 30 us, over 2 to 32 nodes in
# 37 us a node, over one GPU of each of 8 or 32 nodes in 13 us a node, at 48 of 50 GB/s.
_LINK_HOP, _NETWORK_HOP, _NETWORK = 3.8e-6, 13.8e-6, 0.96
_AUTOPARALLEL = "meta-pytorch/autoparallel, tuning values of H100"
_VTRAIN = "Bang et al., vTrain, MICRO 2024, trace/a100"
_BEKMAN = "Bekman, Machine Learning Engineering, pages of accelerators and networks"
_SCALING = "Austin et al., How to Scale Your Model, 2025, chapter TPUs"


@dataclasses.dataclass(frozen=True)
class Achieved:
    """Shares of the peak figures of a ``DeviceKind``, and fixed times in seconds."""

    matmul: float  # of ``flops``, by the best matrix product
    link: float  # of ``link``, by ring collectives of large arrays
    source: str  # of these
    # of ``link``: bytes of the array per second of an all-reduce that a switch sums; None
    # where switches do not sum
    all_reduce: float | None = None
    memory: float = _MEMORY  # of ``bandwidth``, by large element-wise passes
    network: float = _NETWORK  # of ``network``, by collectives of large arrays
    kernel: float = _KERNEL  # seconds of a kernel beside its roofline
    start: float = 0.0  # seconds of any collective
    link_hop: float = _LINK_HOP  # seconds to the next device of a node or torus
    network_hop: float = _NETWORK_HOP  # seconds to the next node or slice
    # bytes: a collective of x bytes takes as long as one of x + sqrt(ramp x) at full speed
    ramp: float = 0.0

    @property
    def typical_matmul(self) -> float:
        """The share of ``flops`` by matrix products of the shapes of a model."""
        return self.matmul * TYPICAL_OF_BEST


# All-gathers of 1 GB over 8 GPUs: 394 GB/s of H100 are 345 by the bytes sent, of 450; all-reduces
# 267 GB/s. A100 sends 229 of 300 in all-reduces of 1 GiB, and starts those of two GPUs in 44 us.
# H200: 366 in a ring, 473 summed by switches, by the bytes of a ring. B200: 846 of 900 at 16 GiB,
# 401 at 64 MiB and 36 at 1 MiB, which determine its ramp.
_RING = 345 / 450
_A100 = Achieved(0.87, 229 / 300, f"{_BEKMAN}; {_VTRAIN}", start=30e-6)
_H100 = Achieved(0.80, _RING, f"{_BEKMAN}; {_AUTOPARALLEL}", all_reduce=267 / 450)
_H200 = Achieved(0.80, 366 / 450, _BEKMAN, all_reduce=473 / 1.75 / 450)
_B200 = Achieved(0.78, _RING, _BEKMAN, all_reduce=846 / 1.75 / 900, ramp=38e6)
_GB200 = dataclasses.replace(_B200, matmul=0.73)
_MI300X = Achieved(0.51, _RING, _BEKMAN)
# PCIe of 16 lanes: 88 % one way.
_PCIE = Achieved(0.80, 0.88, _BEKMAN)


def _tpu(usable: float, nominal: float) -> Achieved:
    """A TPU: 95 % of a link's usable bandwidth; 1 us a hop; 10 us over the network.

    No share of matrix products is published; it is taken as 1.
    """
    return Achieved(
        *(1.0, 0.95 * usable / nominal, _SCALING), kernel=0.0, link_hop=1e-6, network_hop=10e-6
    )


_OF_KIND = {
    "v4": _tpu(45, 45),
    "v5e": _tpu(45, 50),
    "v5p": _tpu(90, 100),
    "v6e": _tpu(90, 100),
    "tpu7x": _tpu(90, 100),
    "a100-40": _A100,
    "a100-80": _A100,
    "h100": _H100,
    "h200": _H200,
    "b200": _B200,
    "gb200": _GB200,
    "mi300x": _MI300X,
}


def achieved(device: DeviceKind) -> Achieved:
    """What a kind reaches; GPUs without an entry reach what an H100 does, over PCIe.

    >>> from sharding.plan import kind_of
    >>> round(achieved(kind_of("a100-80")).typical_matmul, 2)
    0.74
    """
    return _OF_KIND.get(device.name, _PCIE)
