"""Replicas on machines: every set of lost machines is tried, on up to 10 machines."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from sharding.recovery._peer_placement import PLACEMENTS, place_replicas, recovery_probability

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


def loads(holders):
    """How many shards each machine stores."""
    return Counter(itertools.chain.from_iterable(holders))


# --- Probabilities --------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("num_machines", "placement", "lost", "expected"),
    [
        (16, "group", 2, 0.933),
        (16, "group", 3, 0.800),
        (16, "ring", 2, 0.867),
        (16, "ring", 3, 0.629),
        (4, "group", 2, 0.667),
        (4, "ring", 2, 0.333),
        (128, "group", 2, 0.992),
        (128, "group", 8, 0.793),
        (5, "group", 2, 0.600),  # GEMINI's corollary, a bound, says 0.75
    ],
)
def test_published_figures(num_machines, placement, lost, expected):
    holders = place_replicas(range(num_machines), 2, placement)
    found = recovery_probability(holders, num_machines, lost)
    assert found == pytest.approx(expected, abs=5e-4)


def test_many_machines_have_the_closed_forms():
    """Groups: inclusion and exclusion over lost ones. Rings: sets without two neighbours."""
    m, n = 3, 180
    holders = place_replicas(range(n), m)
    for k in (0, 1, m, 2 * m + 1, n // 2, n - n // m, n - n // m + 1, n):
        ways = sum(
            (-1) ** j * math.comb(n // m, j) * math.comb(n - m * j, k - m * j)
            for j in range(k // m + 1)
        )
        assert recovery_probability(holders, n, k) == ways / math.comb(n, k), k
    n, k = 1024, 10
    ways = n * math.comb(n - k, k) // (n - k)
    holders = place_replicas(range(n), 2, "ring")
    assert recovery_probability(holders, n, k) == ways / math.comb(n, k)


# --- Machines -------------------------------------------------------------------------------------


def test_every_machine_stores_as_many_shards_and_groups_lose_no_more_than_rings():
    for n, m in SIZES:
        both = [place_replicas(range(n), m, placement) for placement in ("group", "ring")]
        for holders in both:
            assert_probabilities(holders, n)
            assert [held[0] for held in holders] == list(range(n))
            assert all(len(set(held)) == m for held in holders)
            assert loads(holders) == dict.fromkeys(range(n), m), (n, m)
        groups, ring = (survived(holders, n) for holders in both)
        assert np.all(groups >= ring), (n, m)
        assert np.any(groups > ring) == (m > 1 and n >= 2 * m), (n, m)


def test_no_balanced_placement_of_two_replicas_loses_less():
    """Each machine stores the shard of one other: all permutations without fixed points."""
    for n in range(2, 7):
        found = survived(place_replicas(range(n), 2), n)
        for peers in itertools.permutations(range(n)):
            if all(i != peer for i, peer in enumerate(peers)):
                assert np.all(survived(list(enumerate(peers)), n) <= found)


# --- Failure domains ------------------------------------------------------------------------------

DOMAINS = {
    "pairs": "aabbccdd",
    "interleaved": "abcdabcd",
    "one machine more": "aaabbccdd",
    "one large": "aaaaabbccd",
    "descending": "aaaabbbccd",
    "more than half in one": "aaaaaabcde",
    "uneven, interleaved": "abacabadb",
    "as few as replicas": "aaaabbbbcc",
}
for seed in range(20):  # of random sizes
    rng = np.random.default_rng(seed)
    names = np.repeat(range(seed % 5 + 2), rng.integers(1, 6, seed % 5 + 2))
    DOMAINS[f"random {seed}"] = rng.permutation(names).tolist()


def needed_load(domains, m):
    """The most shards of others that some machine must store in any placement, by Hall's theorem.

    Of each subset of domains: what machines cannot store in the other ones, by its size.
    """
    sizes = Counter(domains)
    needed = 0
    for count in range(1, len(sizes) + 1):
        for subset in itertools.combinations(sizes, count):
            free = {name: len(sizes) - count - (name not in subset) for name in sizes}
            inside = sum(size * max(0, m - 1 - free[name]) for name, size in sizes.items())
            needed = max(needed, -(-inside // sum(sizes[name] for name in subset)))
    return needed


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("domains", DOMAINS.values(), ids=DOMAINS)
def test_replicas_are_in_distinct_domains(domains, placement):
    """So that any m - 1 domains can be lost."""
    for m in range(1, min(len(set(domains)), 4) + 1):
        holders = place_replicas(domains, m, placement, spread=True)
        assert [held[0] for held in holders] == list(range(len(domains)))
        assert all(len({domains[i] for i in held}) == m for held in holders)
        if m > 1:  # of others
            assert max(loads(holders).values()) - 1 <= needed_load(domains, m) + 1, m


def test_domains_of_equal_sizes_cost_nothing():
    """As few sets of machines must not be lost together as without domains."""
    for m in (2, 3, 4):
        for num, size in itertools.product(range(m, 9), (1, 2, 3, 4)):
            if num * size % m == 0:
                spread = place_replicas(np.repeat(range(num), size).tolist(), m, spread=True)
                assert loads(spread) == dict.fromkeys(range(num * size), m)
                assert len(set(map(frozenset, spread))) == num * size // m, (num, size)


def test_errors():
    for domains, replicas, options, message in [
        ("abcd", 5, {}, "replicas=5 needs as many machines, found 4. Give replicas=4 or less"),
        ("abcd", 0, {}, "replicas=0 needs as many machines, found 4"),
        ("aabb", 3, {"spread": True}, "replicas=3 needs as many failure domains, found 2"),
        ("abcd", 2, {"placement": "star"}, "must be one of .'group', 'ring'., got 'star'"),
    ]:
        with pytest.raises(ValueError, match=message):
            place_replicas(domains, replicas, **options)
    for lost in (-1, 5):
        with pytest.raises(ValueError, match=f"lost must be 0 to 4 machines, got {lost}"):
            recovery_probability(place_replicas(range(4), 2), 4, lost)
