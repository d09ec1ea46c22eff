"""What ``PeerCheckpoints.describe`` shows."""

import dataclasses
from collections import Counter

import numpy as np

from sharding.recovery._machines import Machines
from sharding.recovery._peer_placement import Holders, recovery_probability
from sharding.recovery._replica_program import ReplicaProgram

_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class PeerDescription:
    """Where replicas are, and what they cost.

    Attributes:
      machines: names.
      domains: the failure domain of each machine.
      holders: by machine: the machines that store what only it has on its devices, itself first.
      stored: by machine: bytes of one snapshot in its host memory, of which there are two.
      sent: by machine: bytes that it sends for one snapshot.
      sets: the sets of machines that must not be lost together.
    """

    machines: tuple[str, ...]
    domains: tuple[str, ...]
    holders: Holders
    stored: tuple[int, ...]
    sent: tuple[int, ...]
    sets: frozenset[frozenset[int]]

    @property
    def host_bytes(self) -> int:
        """Bytes of two snapshots on the machine that stores most."""
        return 2 * max(self.stored)

    def recovery_probability(self, lost: int) -> float:
        """The exact probability that no shard is lost with so many machines, at random.

        Args:
          lost: how many machines are lost before the next snapshot is complete.
        """
        return recovery_probability([sorted(s) for s in self.sets], len(self.machines), lost)

    def __str__(self) -> str:
        num = len(self.machines)
        lines = [
            f"{num} machine{'s' * (num > 1)}; two snapshots take {_mib(self.host_bytes)} of host "
            f"memory; each sends {_mib(max(self.sent))} per snapshot.",
            *(
                f"  {self.machines[i]}: also on {', '.join(self.machines[j] for j in held[1:])}"
                if len(held) > 1
                else f"  {self.machines[i]}: on no other machine"
                for i, held in enumerate(self.holders[:_SHOWN])
            ),
        ]
        if num > _SHOWN:
            lines.append(f"  and {num - _SHOWN} more")
        chances = [f"{k}: {self.recovery_probability(k):.1%}" for k in range(1, min(num, 4) + 1)]
        lines.append(f"Recovers from lost machines: {', '.join(chances)}.")
        return "\n".join(lines)


def describe_replicas(
    program: ReplicaProgram, machines: Machines, holders: Holders
) -> PeerDescription:
    """The description of a program's replicas."""
    num = len(machines.names)
    stored, sent = [0] * num, [0] * num
    sets = set()
    of = machines.of_device
    kinds: Counter[int] = Counter()
    for leaf, placement in zip(program.leaves, program.placements, strict=True):
        for machine in of[placement.stored].tolist():
            stored[machine] += leaf.block_bytes
        for source, destination in (pair for one in placement.sends for pair in one):
            sent[of[source]] += leaf.block_bytes
            stored[of[destination]] += leaf.block_bytes
        kinds[id(placement)] += 1
        if kinds[id(placement)] == 1 and leaf.block_bytes:
            where: dict[int, set[int]] = {}
            for device in np.flatnonzero(placement.stored).tolist():
                where.setdefault(int(placement.block[device]), set()).add(int(of[device]))
            for source, destination in (pair for one in placement.sends for pair in one):
                where[int(placement.block[source])].add(int(of[destination]))
            sets |= {frozenset(held) for held in where.values()}
    return PeerDescription(
        machines.names, machines.domains, holders, tuple(stored), tuple(sent), frozenset(sets)
    )


def _mib(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**20:,.1f} MiB"
