"""Batches that grow: examples counted one by one, and rates at them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_ext import BatchSchedule

SIZES = [
    {0: 4},
    {0: 4, 10: 8},
    {0: 4, 12: 8, 60: 16},
    {0: 6, 1: 12, 2: 24, 100: 6},  # a size that never runs, and a smaller one
]


def one_by_one(sizes, steps):
    """Size of each step, and examples before it."""
    seen, found = 0, []
    for _ in range(steps):
        size = next(size for at, size in sorted(sizes.items(), reverse=True) if seen >= at)
        found.append((size, seen))
        seen += size
    return found


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_and_examples(sizes):
    schedule = BatchSchedule(sizes)
    for step, (size, seen) in enumerate(one_by_one(sizes, 40)):
        assert (schedule.size(step), schedule.examples(step)) == (size, seen), step


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("rule", "power"), [("linear", 1), ("square root", 0.5), ("constant", 0)])
def test_rates_are_those_of_the_examples_seen(x64, sizes, rule, power):
    base = optax.cosine_decay_schedule(0.3, 50)
    rates = jax.jit(jax.vmap(BatchSchedule(sizes).rates(base, rule)))(jnp.arange(40))
    first = sizes[0]
    want = [float(base(n / first)) * (size / first) ** power for size, n in one_by_one(sizes, 40)]
    np.testing.assert_allclose(rates, want, rtol=1e-12)


def test_it_grows_where_noise_asks_for_it():
    schedule = BatchSchedule({0: 4})
    for step, noise in [(10, 3.0), (20, 5.0), (30, float("nan")), (40, 90.0), (50, 90.0)]:
        schedule = schedule.grown(step, noise, most=16)
    assert schedule.sizes == {0: 4, 80: 8, 240: 16}
    sizes = [schedule.size(step) for step in range(60)]
    assert [len(list(run)) for _, run in itertools.groupby(sizes)] == [20, 20, 20]
    assert schedule.grown(50, 90.0, most=16) is schedule


def test_larger_sizes_of_later_stay():
    schedule = BatchSchedule({0: 4, 100: 8, 1000: 64}).grown(10, 90.0, most=64)
    assert schedule.sizes == {0: 4, 40: 8, 1000: 64}
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        schedule.grown(0, 90.0, most=64)


def test_many_tokens():
    """Of a run of trillions: whole numbers do not overflow."""
    schedule = BatchSchedule({0: 2**22, 10**12: 2**24})
    step = schedule.starts[1]
    assert schedule.examples(step) == -(-(10**12) // 2**22) * 2**22
    assert schedule.examples(step + 10**6) - schedule.examples(step) == 10**6 * 2**24


@pytest.mark.parametrize("sizes", [{}, {1: 4}, {0: 4, 10: 6}, {0: 0}, {0: 4.0}, {0: 4, -1: 8}])
def test_sizes_that_are_none(sizes):
    with pytest.raises(ValueError, match="sizes must map whole numbers of examples"):
        BatchSchedule(sizes)


def test_rules_that_are_none():
    with pytest.raises(ValueError, match=r"rule must be one of 'linear', .* got 'cubic'"):
        BatchSchedule({0: 4}).rates(0.1, "cubic")
