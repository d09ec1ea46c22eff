"""Which machines store the replicas of each machine's shards, and how likely all are lost."""

import math
from collections.abc import Hashable, Sequence

Holders = tuple[tuple[int, ...], ...]
PLACEMENTS = ("group", "ring")


def place_replicas(
    domains: Sequence[Hashable], replicas: int, placement: str = "group", *, spread: bool = False
) -> Holders:
    """The machines that store each machine's shards, the machine itself first.

    ``"group"`` is GEMINI's placement: the machines of a group of ``replicas`` store the shards of
    each other; machines left over form a ring with the last group, in which each stores the shards
    of those before it. ``"ring"`` is one ring of all. Groups lose shards in the fewest cases.

    Args:
      domains: the failure domain of each machine.
      replicas: machines that store each shard, the machine itself included.
      placement: ``"group"`` or ``"ring"``.
      spread: whether the replicas of a shard must be in different failure domains.

    Raises:
      ValueError: if there are fewer machines or failure domains than replicas.

    >>> place_replicas(range(5), 2)
    ((0, 1), (1, 0), (2, 3), (3, 4), (4, 2))
    >>> place_replicas(["a", "a", "b", "b"], 2, spread=True)
    ((0, 2), (1, 3), (2, 0), (3, 1))

    References:
      Wang et al., GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
      Checkpoints, SOSP 2023, algorithm 1.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be one of {PLACEMENTS}, got {placement!r}.")
    places, kind = (len(set(domains)), "failure domain") if spread else (len(domains), "machine")
    if not 1 <= replicas <= places:
        raise ValueError(
            f"replicas={replicas} needs as many {kind}s, found {places}. Give replicas={places} or "
            f"less, or add a {kind}. One replica survives lost processes, but no lost machine."
        )
    num_groups = 1 if placement == "ring" else len(domains) // replicas
    order = _dealt(domains, replicas, num_groups) if spread else list(range(len(domains)))
    holders: dict[int, tuple[int, ...]] = {}
    for g in range(num_groups):
        group = order[g * replicas : (g + 1) * replicas if g < num_groups - 1 else None]
        for i, machine in enumerate(group):
            holders[machine] = tuple(group[(i + j) % len(group)] for j in range(replicas))
    found = tuple(holders[machine] for machine in range(len(domains)))
    if spread and any(len({domains[h] for h in held}) < replicas for held in found):
        return _least_loaded(domains, replicas)
    return found


def _dealt(domains: Sequence[Hashable], replicas: int, num_groups: int) -> list[int]:
    """An order of the machines whose consecutive groups have one machine of a domain each.

    Sorted by domain, machines are dealt to the groups in turn; what is left over comes last.
    """
    names = list(domains)
    ranked = sorted(
        range(len(names)),
        key=lambda i: (-names.count(names[i]), names.index(names[i])),
    )
    if num_groups == 1:  # a ring: the next machine is one of the next domain, while there is one
        turns = [names[:i].count(names[i]) for i in range(len(names))]
        return sorted(ranked, key=lambda i: turns[i])
    dealt = num_groups * replicas
    return [i for g in range(num_groups) for i in ranked[g:dealt:num_groups]] + ranked[dealt:]


def _least_loaded(domains: Sequence[Hashable], replicas: int) -> Holders:
    """For domains of uneven sizes: each replica is kept by the machine that keeps the fewest."""
    names = list(domains)
    load = [0] * len(names)
    found: dict[int, tuple[int, ...]] = {}
    for machine in sorted(range(len(names)), key=lambda i: (-names.count(names[i]), i)):
        held = [machine]
        while len(held) < replicas:
            used = {names[i] for i in held}
            free = [i for i in range(len(names)) if names[i] not in used]
            # Of equals one whose own replica is here already: fewer pairs that must not be lost.
            least = min(free, key=lambda i: (load[i], machine not in found.get(i, ()), i))
            held.append(least)
            load[least] += 1
        found[machine] = tuple(held)
    return tuple(found[machine] for machine in range(len(names)))


def recovery_probability(holders: Sequence[Sequence[int]], num_machines: int, lost: int) -> float:
    """The probability that no shard is lost with ``lost`` machines.

    Exact, each set of so many machines being equally likely: the sets that include no set of
    holders are counted machine by machine, separately for machines without common holders.

    Args:
      holders: the machines that store each shard, in any order, repeated or not.
      num_machines: how many there are.
      lost: how many of them are lost at once.

    >>> round(recovery_probability(place_replicas(range(16), 2), 16, 3), 3)
    0.8
    >>> round(recovery_probability(place_replicas(range(16), 2, "ring"), 16, 3), 3)
    0.629
    """
    if not 0 <= lost <= num_machines:
        raise ValueError(f"lost must be 0 to {num_machines} machines, got {lost}.")
    sets = list({frozenset(held) for held in holders})
    sets = [s for s in sets if not any(other < s for other in sets)]
    by_machine: dict[int, list[int]] = {machine: [] for machine in range(num_machines)}
    for i, members in enumerate(sets):
        for machine in members:
            by_machine[machine].append(i)
    ways, rest = [1], set(by_machine)
    while rest:
        order = _connected(min(rest), sets, by_machine)
        rest -= set(order)
        ways = _product(ways, _survivable(order, sets, by_machine, lost), lost)
    return ways[lost] / math.comb(num_machines, lost) if lost < len(ways) else 0.0


def _connected(
    first: int, sets: list[frozenset[int]], by_machine: dict[int, list[int]]
) -> list[int]:
    """Machines that share holders with the first, directly or not, neighbours close together."""
    order, waiting = [], [first]
    seen = {first}
    while waiting:
        machine = waiting.pop(0)
        order.append(machine)
        near = sorted({m for i in by_machine[machine] for m in sets[i]} - seen)
        seen.update(near)
        waiting += near
    return order


def _survivable(
    order: list[int], sets: list[frozenset[int]], by_machine: dict[int, list[int]], lost: int
) -> list[int]:
    """For each number of lost machines: how many choices of them include none of the sets."""
    place = {machine: i for i, machine in enumerate(order)}
    first = {i: min(place[m] for m in sets[i]) for m in order for i in by_machine[m]}
    last = {i: max(place[m] for m in sets[i]) for m in order for i in by_machine[m]}
    # By the begun sets whose machines were all lost so far: the choices of each number.
    states: dict[frozenset[int], list[int]] = {frozenset(): [1]}
    for at, machine in enumerate(order):
        after: dict[frozenset[int], list[int]] = {}
        for doomed, ways in states.items():
            kept = doomed.difference(by_machine[machine])
            after[kept] = _sum_of_polynomials(after.get(kept, []), ways)
            begun = doomed.union(i for i in by_machine[machine] if first[i] == at)
            if not any(last[i] == at for i in begun):
                after[begun] = _sum_of_polynomials(after.get(begun, []), [0, *ways][: lost + 1])
        states = after
    (ways,) = states.values()
    return ways


def _sum_of_polynomials(a: list[int], b: list[int]) -> list[int]:
    """The sum of two polynomials."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return [x + (shorter[i] if i < len(shorter) else 0) for i, x in enumerate(longer)]


def _product(a: list[int], b: list[int], degree: int) -> list[int]:
    """The product of two polynomials, up to a degree."""
    found = [0] * min(len(a) + len(b) - 1, degree + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b[: len(found) - i]):
            found[i + j] += x * y
    return found
