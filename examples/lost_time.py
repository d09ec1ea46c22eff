"""Training time that failures and checkpoints take, on disk and in the memory of peers (GEMINI).

With a checkpoint every s + b seconds, s of them steps and b blocked, that can be restored w seconds
later, the share of time that brings progress at f failures per second is (Wang et al., SOSP 2023)
f s exp(-f (w + restart + reading)) / (exp(f (s + b)) - 1). Put your figures in ``main``:

  python examples/lost_time.py
"""

import bisect
import math
from typing import NamedTuple


class Period(NamedTuple):
    """From one checkpoint to the next, in seconds."""

    training: float  # of steps
    blocked: float  # for which training then waits
    delay: float  # after that until the checkpoint can be restored

    def progress(self, failures, restart):
        """The share of time that brings progress, with so many failures a second."""
        x = failures * (self.training + self.blocked)
        if not x:
            return self.training / (self.training + self.blocked)
        kept = failures * self.training / -math.expm1(-x)  # of what a failure interrupts
        return kept * math.exp(-x - failures * (self.delay + restart))


class Run(NamedTuple):
    """A training run, in seconds; files are read as fast as they are written."""

    failures: float  # of all machines, a second
    step: float
    restart: float  # from a failure until processes can read a checkpoint
    write: float  # of a checkpoint on disk
    blocked: float  # for which training waits at it
    delay: float  # after that until it can be restored: ``write`` where that runs beside training

    def on_disk(self, interval):
        """The share of time that is lost with a checkpoint on disk every so many steps."""
        period = Period(interval * self.step, self.blocked, self.delay)
        return 1 - period.progress(self.failures, self.restart + self.write)

    def best_interval(self):
        """The steps between checkpoints on disk that lose least, if one is written at a time."""
        shortest = max(1, math.ceil((self.delay - self.blocked) / self.step))

        def is_long(interval):  # the best has 1 - exp(-f s - f b) = f s
            x = self.failures * interval * self.step
            return -math.expm1(-x - self.failures * self.blocked) <= x

        longest = range(math.ceil(1 / (self.failures * self.step)) + 1)
        best = bisect.bisect_left(longest, True, key=is_long)
        return min(max(shortest, best - 1), max(shortest, best), key=self.on_disk)

    def with_peers(self, interval, overhead, restore, recovered, disk_interval):
        """The share with snapshots in the memory of peers, which recover so many failures."""
        # These slow steps down, and have a blocked file begin again.
        peers = self.failures * recovered, self.restart + restore
        speed = Period(interval * self.step, overhead, interval * self.step).progress(*peers)
        again = Period(self.blocked, 0.0, 0.0).progress(*peers) if self.blocked else 1.0
        files = Period(disk_interval * self.step / speed, self.blocked / again, self.delay)
        others = self.failures * (1 - recovered), self.restart + self.write
        return 1 - speed * files.progress(*others)


def main():
    """The failures of Llama 3's training (Grattafiori et al., 2024); other figures are assumed."""
    machines, of_one = 128, 54 * 86_400 * 2048 / 419  # 419 failures of 2,048 machines in 54 days
    run = Run(machines / of_one, 23.8, restart=300.0, write=1948.0, blocked=5.0, delay=1948.0)
    best = run.best_interval()
    peers = run.with_peers(5, overhead=0.5, restore=10.0, recovered=0.9996, disk_interval=454)
    print(f"on disk every {best} steps, which is best: {run.on_disk(best):.2%} of the time is lost")
    print(f"in memory every 5 steps, on disk every 454: {peers:.2%}")


if __name__ == "__main__":
    main()
