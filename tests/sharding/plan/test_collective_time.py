"""The time of collectives beside measured ones; each row says which error is reached."""

import pytest

from sharding.plan import kind_of
from sharding.plan.machine._collective_time import NodeGroup, TorusGroup, collective_seconds

MIB, GIB = 2**20, 2**30
# Seconds of meta-pytorch/autoparallel (H100), vTrain's trace/a100, and Bekman's page of networks:
# operation, bytes, devices, devices in a node, kind, measured seconds, error that is reached.
MEASURED = [
    # Latency alone.
    ("all-gather", 0, 2, 2, "h100", 8e-6, 0.06),
    ("all-gather", 0, 4, 4, "h100", 17e-6, 0.11),
    ("all-gather", 0, 8, 8, "h100", 30e-6, 0.02),
    ("all-gather", 0, 16, 8, "h100", 70e-6, 0.16),
    ("all-gather", 0, 32, 8, "h100", 146e-6, 0.11),
    ("all-gather", 0, 64, 8, "h100", 297e-6, 0.09),
    ("all-gather", 0, 128, 8, "h100", 599e-6, 0.08),
    ("all-gather", 0, 256, 8, "h100", 1204e-6, 0.08),
    ("all-gather", 0, 8, 1, "h100", 106e-6, 0.05),
    ("all-gather", 0, 32, 1, "h100", 442e-6, 0.01),
    ("all-reduce", 0, 2, 2, "h100", 10e-6, 0.25),
    ("all-reduce", 0, 4, 4, "h100", 15e-6, 0.02),
    ("all-reduce", 0, 8, 8, "h100", 31e-6, 0.02),
    # Large arrays; a pair of GPUs reaches less of its links than eight.
    ("all-gather", 1e9, 2, 2, "h100", 1e9 / 537e9, 0.23),
    ("all-gather", 1e9, 4, 4, "h100", 1e9 / 434e9, 0.06),
    ("all-gather", 1e9, 8, 8, "h100", 1e9 / 394e9, 0.02),
    ("all-reduce", 1e9, 2, 2, "h100", 1e9 / 324e9, 0.07),
    ("all-reduce", 1e9, 4, 4, "h100", 1e9 / 236e9, 0.12),
    ("all-reduce", 1e9, 8, 8, "h100", 1e9 / 267e9, 0.01),
    ("all-gather", 10e9, 16, 8, "h100", 10e9 / 410e9, 0.01),
    ("all-gather", 10e9, 32, 8, "h100", 10e9 / 396e9, 0.01),
    ("all-gather", 10e9, 256, 8, "h100", 10e9 / 386e9, 0.06),
    ("all-gather", 10e9, 8, 1, "h100", 10e9 / 55e9, 0.01),
    ("all-gather", 10e9, 32, 1, "h100", 10e9 / 50e9, 0.02),
    # Bus bandwidth is 2 (n - 1) / n of the array per second.
    ("all-reduce", 8 * GIB, 8, 8, "h200", 8 * GIB * 1.75 / 473e9, 0.01),
    ("all-reduce", MIB, 8, 8, "a100-80", 92.8e-6, 0.08),
    ("all-reduce", 8 * MIB, 8, 8, "a100-80", 134.3e-6, 0.16),
    ("all-reduce", 64 * MIB, 8, 8, "a100-80", 579.9e-6, 0.05),
    ("all-reduce", GIB, 8, 8, "a100-80", 8193e-6, 0.02),
    ("all-reduce", MIB, 2, 2, "a100-80", 44.2e-6, 0.14),
    ("all-reduce", 64 * MIB, 2, 2, "a100-80", 404.7e-6, 0.17),
    ("all-reduce", 64 * MIB, 4, 4, "a100-80", 543.8e-6, 0.09),
    ("all-reduce", MIB, 8, 8, "b200", MIB * 1.75 / 36e9, 0.11),
    ("all-reduce", 64 * MIB, 8, 8, "b200", 64 * MIB * 1.75 / 401e9, 0.07),
    ("all-reduce", 16 * GIB, 8, 8, "b200", 16 * GIB * 1.75 / 846e9, 0.05),
    ("all-reduce", MIB, 32, 8, "b200", MIB * 2 * 31 / 32 / 5.4e9, 0.05),
    ("all-reduce", 64 * MIB, 32, 8, "b200", 64 * MIB * 2 * 31 / 32 / 157e9, 0.11),
    ("all-reduce", 16 * GIB, 32, 8, "b200", 16 * GIB * 2 * 31 / 32 / 382e9, 0.05),
]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(map(str, row[:5])))
def test_measured_collectives(row):
    operation, nbytes, size, inside, kind, seconds, error = row
    found = collective_seconds(operation, nbytes, NodeGroup(size, inside), kind_of(kind))
    assert found == pytest.approx(seconds, rel=error)


@pytest.mark.parametrize(
    ("operation", "group", "kind", "gigabytes", "speed"),
    [
        # As in How to Scale Your Model: (n - 1) / n of the array, over 2 k links.
        ("all-gather", TorusGroup(((16, True),)), "v5e", 15 / 16, 2 * 50),  # both ways
        ("all-gather", TorusGroup(((8, False),)), "v5e", 7 / 8, 50),
        ("all-gather", TorusGroup(((16, True), (16, True))), "v5e", 255 / 256, 4 * 50),
        ("all-gather", TorusGroup(((4, True), (4, False))), "v5e", 15 / 16, 3 * 50),
        ("all-gather", TorusGroup(((4, True), (1, False))), "v5e", 3 / 4, 2 * 50),  # one has none
        # A quarter of the gather of all operands together.
        ("all-to-all", TorusGroup(((16, True),)), "v5e", 16 / 4, 2 * 50),
        ("permute", NodeGroup(2, 2), "h100", 1, 450),
        ("permute", NodeGroup(2, 1), "h100", 1, 50),
        ("permute", TorusGroup(((4, False),)), "v5e", 1, 50),
    ],
)
def test_ideal_seconds(operation, group, kind, gigabytes, speed):
    found = collective_seconds(operation, 1e9, group, kind_of(kind), ideal=True)
    assert found == pytest.approx(gigabytes / speed)
    if operation == "all-gather":
        twice = collective_seconds("all-reduce", 1e9, group, kind_of(kind), ideal=True)
        assert twice == pytest.approx(2 * found)


def test_errors():
    with pytest.raises(ValueError, match=r"operation must be one of 'all-gather'.*got 'gather'"):
        collective_seconds("gather", 1.0, NodeGroup(8, 8), kind_of("h100"))
    with pytest.raises(ValueError, match="the network of an l40s is not known"):
        collective_seconds("all-reduce", 1.0, NodeGroup(16, 8), kind_of("l40s"))
