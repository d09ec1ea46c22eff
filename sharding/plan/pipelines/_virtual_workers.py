"""HetPipe's allocation of unequal devices to virtual workers."""

import dataclasses
import math
from collections.abc import Sequence

POLICIES = ("node", "equal", "hybrid")


@dataclasses.dataclass(frozen=True)
class Node:
    """Equal devices that share fast links.

    Attributes:
      devices: their number.
      memory: bytes of each.
      speed: of each, relative to the device of the costs.
      link: bytes per second between two of them.
    """

    devices: int
    memory: float
    speed: float = 1.0
    link: float = math.inf


def allocate_workers(
    nodes: Sequence[Node], policy: str, num_workers: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The nodes of the devices of each virtual worker.

    - ``"node"``: each node is a virtual worker.
    - ``"equal"``: each node gives every virtual worker the same number of devices.
    - ``"hybrid"``: the node with the most compute is paired with that with the least, and so on;
      each pair is two virtual workers with half of the devices of both. A node that is left is one.

    Args:
      nodes: the nodes.
      policy: one of ``"node"``, ``"equal"``, ``"hybrid"``.
      num_workers: of ``"equal"``; None: as many as nodes.

    Returns:
      A tuple of numbers of nodes for each virtual worker.

    Raises:
      ValueError: the policy is unknown, or devices cannot be shared equally.

    >>> nodes = [Node(2, 1.0, speed=s) for s in (1, 4, 2, 3)]
    >>> allocate_workers(nodes, "hybrid")
    ((1, 0), (1, 0), (3, 2), (3, 2))
    """
    if not nodes:
        raise ValueError("nodes are empty; virtual workers need at least one node.")
    if policy not in POLICIES:
        known = ", ".join(map(repr, POLICIES))
        raise ValueError(f"policy must be one of {known}, got {policy!r}.")
    if policy == "node":
        return tuple((i,) * node.devices for i, node in enumerate(nodes))
    if policy == "equal":
        return tuple(_shared(nodes, range(len(nodes)), num_workers or len(nodes)))
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].speed * nodes[i].devices, i))
    workers = []
    while len(order) > 1:
        workers += _shared(nodes, (order.pop(0), order.pop()), 2)
    return (*workers, *((i,) * nodes[i].devices for i in order))


def _shared(nodes: Sequence[Node], numbers: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Some nodes in equal shares."""
    for i in numbers:
        if nodes[i].devices % workers:
            raise ValueError(
                f"node {i} has {nodes[i].devices} devices, which {workers} virtual workers cannot "
                "share equally."
            )
    return [tuple(i for i in numbers for _ in range(nodes[i].devices // workers))] * workers
