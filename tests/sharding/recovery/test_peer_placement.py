"""Replicas on machines: every set of lost machines is tried, on up to 10 machines."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from sharding.recovery._peer_placement import place_replicas, recovery_probability

SIZES = [(n, m) for n in range(1, 11) for m in range(1, min(n, 4) + 1)]


def survived(holders, num_machines):
    """How many sets of k lost machines leave a replica of every shard, for every k."""
    lost = np.arange(2**num_machines, dtype=np.uint32)
    fatal = np.zeros(len(lost), bool)
    for held in set(map(frozenset, holders)):
        bits = np.uint32(sum(1 << machine for machine in held))
        fatal |= (lost & bits) == bits
    return np.bincount(np.bitwise_count(lost)[~fatal], minlength=num_machines + 1)


def assert_probabilities(holders, n):
    """By brute force, for every number of lost machines."""
    ways = survived(holders, n).tolist()
    found = [recovery_probability(holders, n, k) for k in range(n + 1)]
    assert found == [ways[k] / math.comb(n, k) for k in range(n + 1)]


@pytest.mark.parametrize("seed", range(8))
def test_equals_brute_force_for_any_holders(seed):
    """Sets of different sizes, repeated, within each other, apart; machines that store nothing."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 11))
    holders = [
        rng.choice(n, int(rng.integers(1, min(n, 5) + 1)), replace=False).tolist()
        for _ in range(int(rng.integers(1, 14)))
    ]
    assert_probabilities([*holders, holders[0][::-1] * 2], n)


def test_every_machine_stores_as_many_shards_and_groups_lose_no_more_than_rings():
    for n, m in SIZES:
        ring = [[(i + j) % n for j in range(m)] for i in range(n)]
        both = [place_replicas(range(n), m), ring]
        for holders in both:
            assert_probabilities(holders, n)
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
    with pytest.raises(ValueError, match="lost must be 0 to 4 machines, got 5"):
        recovery_probability(place_replicas(range(4), 2), 4, 5)
