"""Batches that grow over a run: which step has which size, and its learning rate."""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext import _validate


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    r"""The batch size of each step of a run, by how many examples were seen before.

    Few sizes, each a multiple of the first: a step of k times the first size has k times as many
    micro-batches, so memory stays, and few programs are compiled. A size begins with the first step
    that starts at its number of examples or after it, so every number is a function of the step
    alone: a run that resumes, or has other devices, sees the same examples in the same steps.

    Args:
      sizes: from examples (or tokens) seen to the batch size from there on; the first is at 0.

    Attributes:
      starts: the first step of each size.

    Raises:
      ValueError: if there is no size at 0, a number is not a whole one, or a size is not a multiple
        of the first.

    Example:
      >>> from optax_ext import BatchSchedule
      >>> schedule = BatchSchedule({0: 256, 1000: 512})
      >>> [schedule.size(step) for step in (0, 3, 4, 5)], schedule.examples(5)
      ([256, 256, 512, 512], 1536)

    References:
      Smith, Kindermans, Ying, Le: Don't Decay the Learning Rate, Increase the Batch Size, ICLR
      2018, arXiv 1711.00489. McCandlish et al.: An Empirical Model of Large-Batch Training, 2018,
      arXiv 1812.06162.
    """

    sizes: Mapping[int, int]
    starts: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        sizes = dict(sorted(self.sizes.items()))
        numbers = [*sizes.keys(), *sizes.values()]
        whole = all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in numbers)
        if not whole or 0 not in sizes or any(x < 1 or x % sizes[0] for x in sizes.values()):
            raise ValueError(
                "sizes must map whole numbers of examples, the first 0, to batch sizes that are "
                f"multiples of the first, got {dict(self.sizes)}."
            )
        starts, seen = [0], 0
        for (_, size), (until, _) in itertools.pairwise(sizes.items()):
            steps = max(-(-(until - seen) // size), 0)
            starts.append(starts[-1] + steps)
            seen += steps * size
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "starts", tuple(starts))

    def size(self, step: int) -> int:
        """The examples of a step, counted from 0."""
        return list(self.sizes.values())[bisect.bisect_right(self.starts, step) - 1]

    def examples(self, step: int) -> int:
        """How many were seen before a step."""
        ends = (*self.starts[1:], max(step, self.starts[-1]))
        runs = zip(self.starts, ends, self.sizes.values(), strict=True)
        return sum(size * max(min(step, end) - start, 0) for start, end, size in runs)

    def rates(
        self, learning_rate: optax.ScalarOrSchedule, rule: str = "square root"
    ) -> optax.Schedule:
        r"""The learning rate of each step, of a schedule that was written for the first size.

        With n examples seen, first size :math:`B_0`, and p = 1 for ``"linear"`` (Goyal et al., of
        SGD), 1/2 for ``"square root"`` (Adam and others), 0 for ``"constant"``,

        .. math::

          \eta' = \eta(n / B_0) \, (B / B_0)^p

        so that a decay ends after as many examples as it would with the first size.

        Raises:
          ValueError: if there is no such rule, or a constant rate is negative.

        Example:
          >>> from optax_ext import BatchSchedule
          >>> rates = BatchSchedule({0: 256, 1000: 1024}).rates(0.1, "linear")
          >>> [round(float(rates(step)), 3) for step in (0, 3, 4)]
          [0.1, 0.1, 0.4]
        """
        powers = {"linear": 1.0, "square root": 0.5, "constant": 0.0}
        if rule not in powers:
            raise ValueError(f"rule must be one of {', '.join(map(repr, powers))}, got {rule!r}.")
        _validate.rate(learning_rate=learning_rate)
        first = self.sizes[0]
        starts = np.array(self.starts)
        # In steps of the first size, from whole numbers: exact up to 2^24 of them.
        seen = np.array([self.examples(start) / first for start in self.starts])
        ratios = np.array([size / first for size in self.sizes.values()])

        def schedule(count: jax.typing.ArrayLike) -> jax.Array:
            at = jnp.searchsorted(jnp.asarray(starts), jnp.asarray(count), side="right") - 1
            ratio = jnp.asarray(ratios, float)[at]
            done = jnp.asarray(seen, float)[at] + (count - jnp.asarray(starts)[at]) * ratio
            return _validate.value_at(learning_rate, done) * ratio ** powers[rule]

        return schedule

    def grown(self, step: int, noise_scale: float, most: int) -> "BatchSchedule":
        """The schedule with a doubled size from a step on, if the noise scale asks for it.

        A batch below the gradient noise scale (``optax_ext.noise_scale``, in examples) averages too
        little noise away. Call it where you look at the noise scale, such as every thousand steps:
        the same values give the same schedule, and sizes stay few.

        Args:
          step: from which the new size counts.
          noise_scale: measured there, in examples.
          most: the largest size that fits the run; it is not exceeded.

        Raises:
          ValueError: if ``step`` is below 1.

        Example:
          >>> from optax_ext import BatchSchedule
          >>> BatchSchedule({0: 256}).grown(100, noise_scale=900.0, most=4096).sizes
          {0: 256, 25600: 512}
        """
        if step < 1:
            raise ValueError(
                f"step must be at least 1, got {step}: the first size, which counts micro-batches "
                "and rates, is that of the steps before."
            )
        size = self.size(step)
        if not noise_scale > size or 2 * size > most:
            return self
        seen = self.examples(step)
        # A larger size that was planned for later stays.
        kept = {at: n for at, n in self.sizes.items() if at < seen or n > 2 * size}
        return BatchSchedule(kept | {seen: 2 * size})
