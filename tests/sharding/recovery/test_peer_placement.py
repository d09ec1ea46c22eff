"""Replicas on machines: every set of lost machines is tried, on up to 10 machines."""

import itertools
from collections import Counter

import numpy as np
import pytest

from sharding.recovery._peer_placement import place_replicas

SIZES = [(n, m) for n in range(1, 11) for m in range(1, min(n, 4) + 1)]


def survived(holders, num_machines):
    """How many sets of k lost machines leave a replica of every shard, for every k."""
    lost = np.arange(2**num_machines, dtype=np.uint32)
    fatal = np.zeros(len(lost), bool)
    for held in set(map(frozenset, holders)):
        bits = np.uint32(sum(1 << machine for machine in held))
        fatal |= (lost & bits) == bits
    return np.bincount(np.bitwise_count(lost)[~fatal], minlength=num_machines + 1)


def test_every_machine_stores_as_many_shards_and_groups_lose_no_more_than_rings():
    for n, m in SIZES:
        ring = [[(i + j) % n for j in range(m)] for i in range(n)]
        both = [place_replicas(range(n), m), ring]
        for holders in both:
            assert [held[0] for held in holders] == list(range(n))
            assert all(len(set(held)) == m for held in holders)
            loads = Counter(itertools.chain.from_iterable(holders))
            assert loads == dict.fromkeys(range(n), m), (n, m)
        groups, ring = (survived(holders, n) for holders in both)
        assert np.all(groups >= ring), (n, m)
        assert np.any(groups > ring) == (m > 1 and n >= 2 * m), (n, m)


DOMAINS = {
    "pairs": "aabbccdd",
    "interleaved": "abcdabcd",
    "more than half in one": "aaaaaabcde",
    "uneven, interleaved": "abacabadb",
    "as few as replicas": "aaaabbbbcc",
}
for seed in range(20):  # of random sizes
    rng = np.random.default_rng(seed)
    names = np.repeat(range(seed % 5 + 2), rng.integers(1, 6, seed % 5 + 2))
    DOMAINS[f"random {seed}"] = rng.permutation(names).tolist()


@pytest.mark.parametrize("domains", DOMAINS.values(), ids=DOMAINS)
def test_replicas_are_in_distinct_domains(domains):
    """So that any m - 1 domains can be lost."""
    for m in range(1, min(len(set(domains)), 4) + 1):
        holders = place_replicas(domains, m, spread=True)
        assert [held[0] for held in holders] == list(range(len(domains)))
        assert all(len({domains[i] for i in held}) == m for held in holders)


def test_errors():
    with pytest.raises(ValueError, match="replicas=3 needs as many failure domains, found 2"):
        place_replicas("aabb", 3, spread=True)
