"""Which machines store the replicas of each machine's shards, and how many may be lost."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from sharding.recovery._machines import Holders, Machines
from sharding.recovery._stored_leaf import BlockPlacement, StoredLeaf

_SHOWN = 8  # machines that are listed
_ALONE = "on no other machine"  # is said of those without peers


def place_replicas(domains: Sequence[Hashable], replicas: int, *, spread: bool = False) -> Holders:
    """Chooses the machines that store each machine's shards, the machine itself first.

    GEMINI's placement (algorithm 1): the machines of a group of ``replicas`` store the shards of
    each other; machines left over form a ring with the last group. ``spread``: the replicas of a
    shard are in different failure domains.

    >>> place_replicas(range(5), 2)
    ((0, 1), (1, 0), (2, 3), (3, 4), (4, 2))
    >>> place_replicas(["a", "a", "b", "b"], 2, spread=True)
    ((0, 2), (1, 3), (2, 0), (3, 1))
    """
    places, kind = (len(set(domains)), "failure domain") if spread else (len(domains), "machine")
    if not 1 <= replicas <= places:
        raise ValueError(
            f"replicas={replicas} needs as many {kind}s, found {places}. Give replicas={places} or "
            f"less, or add a {kind}. One replica survives lost processes, but no lost machine."
        )
    num_groups = len(domains) // replicas
    order = _dealt(domains, replicas, num_groups) if spread else list(range(len(domains)))
    holders: dict[int, tuple[int, ...]] = {}
    for g in range(num_groups):
        group = order[g * replicas : (g + 1) * replicas if g < num_groups - 1 else None]
        for i, machine in enumerate(group):
            holders[machine] = tuple(group[(i + j) % len(group)] for j in range(replicas))
    if spread and any(len({domains[h] for h in held}) < replicas for held in holders.values()):
        return _least_loaded(domains, replicas)
    return tuple(holders[machine] for machine in range(len(domains)))


def _dealt(domains: Sequence[Hashable], replicas: int, num_groups: int) -> list[int]:
    """Orders machines so that consecutive groups have one machine of a domain each."""
    # Sorted by domain, machines are dealt to the groups in turn; what is left over comes last.
    names = list(domains)
    ranked = sorted(
        range(len(names)), key=lambda i: (-names.count(names[i]), names.index(names[i]))
    )
    if num_groups == 1:  # a ring: the next machine is one of the next domain, while there is one
        return sorted(ranked, key=lambda i: names[:i].count(names[i]))
    dealt = num_groups * replicas
    return [i for g in range(num_groups) for i in ranked[g:dealt:num_groups]] + ranked[dealt:]


def _least_loaded(domains: Sequence[Hashable], replicas: int) -> Holders:
    """For domains of uneven sizes: each replica goes to the machine that stores the fewest."""
    names = list(domains)
    load = [0] * len(names)
    holders: dict[int, tuple[int, ...]] = {}
    for machine in sorted(range(len(names)), key=lambda i: (-names.count(names[i]), i)):
        held = [machine]
        while len(held) < replicas:
            used = {names[i] for i in held}
            free = [i for i in range(len(names)) if names[i] not in used]
            # Of equals one whose own replica is here already: fewer pairs that must not be lost.
            least = min(free, key=lambda i: (load[i], machine not in holders.get(i, ()), i))
            held.append(least)
            load[least] += 1
        holders[machine] = tuple(held)
    return tuple(holders[machine] for machine in range(len(names)))


@dataclasses.dataclass(frozen=True)
class PeerDescription:
    """Where replicas are, and what they cost."""

    machines: tuple[str, ...]  #: names
    domains: tuple[str, ...]  #: the failure domain of each machine
    #: by machine: the machines that store what only it has on its devices, itself first
    holders: Holders
    #: by machine: bytes of one snapshot in its host memory, of which there are two
    stored: tuple[int, ...]
    sent: tuple[int, ...]  #: by machine: bytes that it sends for one snapshot
    sets: frozenset[frozenset[int]]  #: the sets of machines that must not be lost together

    @property
    def host_bytes(self) -> int:
        """Bytes of two snapshots on the machine that stores most."""
        return 2 * max(self.stored)

    @property
    def harmless(self) -> int:
        """How many machines, whichever they are, can be lost at once without losing a shard."""
        return min(map(len, self.sets), default=len(self.machines) + 1) - 1

    def __str__(self) -> str:
        num = len(self.machines)
        lines = [
            f"{num} machine{'s' * (num > 1)}; two snapshots take {_mib(self.host_bytes)} of host "
            f"memory; each sends {_mib(max(self.sent))} per snapshot."
        ]
        for held in self.holders[:_SHOWN]:
            own, *others = (self.machines[i] for i in held)
            lines.append(f"  {own}: {'also on ' + ', '.join(others) if others else _ALONE}")
        if num > _SHOWN:
            lines.append(f"  and {num - _SHOWN} more")
        some = f"Any {self.harmless} of the machines can be lost without a shard."
        lines.append(some if self.harmless else "Each lost machine loses shards.")
        return "\n".join(lines)


def describe_replicas(
    placed: Iterable[tuple[StoredLeaf, BlockPlacement]], machines: Machines
) -> PeerDescription:
    """Counts what each machine stores and sends, and finds which machines share a block."""
    num = len(machines.names)
    machine_of = machines.of_device.tolist()
    stored, sent = [0] * num, [0] * num
    sets: set[frozenset[int]] = set()
    for leaf, placement in placed:
        owners: dict[int, set[int]] = {}  # by block: machines
        for device in np.flatnonzero(placement.stored).tolist():
            stored[machine_of[device]] += leaf.block_bytes
            owners.setdefault(int(placement.block[device]), set()).add(machine_of[device])
        for source, destination in (pair for pairs in placement.sends for pair in pairs):
            sent[machine_of[source]] += leaf.block_bytes
            stored[machine_of[destination]] += leaf.block_bytes
            owners[int(placement.block[source])].add(machine_of[destination])
        if leaf.block_bytes:
            sets.update(map(frozenset, owners.values()))
    of_machines = machines.names, machines.domains, machines.holders
    return PeerDescription(*of_machines, tuple(stored), tuple(sent), frozenset(sets))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
