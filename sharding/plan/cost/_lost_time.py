"""Training time that failures and checkpoints take, on disk and in the memory of peers."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sharding.plan._format import Printed, Table, seconds
from sharding.recovery._peer_placement import place_replicas, recovery_probability


@dataclasses.dataclass(frozen=True)
class CheckpointLoss:
    """What one way to save checkpoints loses."""

    interval: int  #: steps between checkpoints; with peers, between snapshots
    overhead: float  #: the share of a run without failures in which training waits for checkpoints
    lost: float  #: seconds lost by a failure on average, until training resumes
    share: float  #: the share of all time that brings no progress, for both reasons


@dataclasses.dataclass(frozen=True)
class LostTime(Printed):
    """Lost time of three ways to save checkpoints; ``str()`` makes a table."""

    failures: float  #: of all machines, a day
    recovered: float  #: the share of failures after which peers have the state
    disk: CheckpointLoss  #: checkpoints on disk at the given interval
    best_disk: CheckpointLoss  #: checkpoints on disk at the interval that loses least
    peers: CheckpointLoss  #: snapshots in the memory of peers, and checkpoints on disk beside them

    def tables(self) -> list[Table]:
        ways = {"disk": self.disk, "disk, best interval": self.best_disk}
        ways |= {"peers and disk": self.peers}
        rows = [
            (name, f"{x.interval:,}", f"{x.overhead:.2%}", seconds(x.lost), f"{x.share:.2%}")
            for name, x in ways.items()
        ]
        title = f"{self.failures:.3g} failures a day; peers recover {self.recovered:.2%} of them"
        columns = ("checkpoints", "steps between", "overhead", "lost a failure", "time lost")
        return [Table(title, columns, rows)]


class _Period(NamedTuple):
    """From one checkpoint to the next."""

    training: float  # seconds of steps
    blocked: float  # seconds for which training then waits
    delay: float  # seconds after that until the checkpoint can be restored

    def progress(self, failures: float = 0.0, restart: float = 0.0) -> float:
        """Training by the time it takes, with so many failures a second."""
        x = failures * (self.training + self.blocked)
        if not x:
            return self.training / (self.training + self.blocked)
        # Of 1 / failures seconds until a failure, those up to the last checkpoint remain.
        kept = failures * self.training / -math.expm1(-x)
        return kept * math.exp(-x - failures * (self.delay + restart))

    def lost(self, restart: float) -> float:
        """Seconds that a failure costs on average."""
        return (self.training + self.blocked) / 2 + self.delay + restart


def lost_time(
    state_bytes: float,
    *,
    num_machines: int,
    machine_mtbf: float,
    step: float,
    restart: float,
    disk_bandwidth: float,
    disk_interval: int,
    disk_blocking: float | None = None,
    peer_interval: int = 1,
    peer_overhead: float = 0.0,
    peer_restore: float = 0.0,
    disk_interval_with_peers: int | None = None,
    replicas: int = 2,
    recovery: Callable[[int], float] | None = None,
    lost_machines: Mapping[int, float] | None = None,
) -> LostTime:
    """The share of training time that failures and checkpoints take (GEMINI, SOSP 2023).

    With a checkpoint every T seconds that can be restored w seconds later, a failure loses
    w + T / 2 + restart + reading. Of T = s + b seconds, s of them steps and b blocked, at failure
    rate f = num_machines / machine_mtbf the share that brings progress is

    f s exp(-f (w + restart + reading)) / (exp(f T) - 1),

    whose best interval for small f b is Young's, sqrt(2 b / f). A snapshot counts once the next one
    begins. Failures that peers recover from slow the steps between checkpoints on disk down.

    Args:
      state_bytes: of the state, all machines together.
      num_machines: how many there are.
      machine_mtbf: seconds between failures of one machine.
      step: seconds of a training step without checkpoints.
      restart: seconds from a failure until processes can read a checkpoint.
      disk_bandwidth: of the storage in bytes per second, for all machines together.
      disk_interval: steps between checkpoints on disk.
      disk_blocking: seconds for which training waits at a checkpoint; None: until it is written.
      peer_interval: steps between snapshots.
      peer_overhead: seconds by which a snapshot delays training.
      peer_restore: seconds in which the state is restored from memory.
      disk_interval_with_peers: steps between checkpoints on disk beside snapshots; None: the same.
      replicas: machines that store each shard, in groups; ignored if ``recovery`` is given.
      recovery: from the number of machines lost at once to the probability that no shard is lost.
      lost_machines: the probability that a failure loses so many machines, by their number, 0 for
        killed processes whose machines keep their memory; None: one in every failure.

    Raises:
      ValueError: for a number outside its range, probabilities that do not add up to 1, or an
        interval within which a checkpoint is not written.

    >>> print(lost_time(7e12, num_machines=128, machine_mtbf=250 * 86_400, step=20.0, restart=300.0,
    ...     disk_bandwidth=20e9, disk_interval=90, disk_blocking=10.0, peer_interval=5,
    ...     peer_overhead=0.2, peer_restore=10.0, disk_interval_with_peers=540))
    0.512 failures a day; peers recover 100.00% of them
      checkpoints         steps between overhead lost a failure time lost
      disk                           90    0.55%        1,905 s     1.67%
      disk, best interval            92    0.54%        1,925 s     1.67%
      peers and disk                  5    0.29%          460 s     0.56%
    """
    rare = disk_interval if disk_interval_with_peers is None else disk_interval_with_peers
    whole = {"num_machines": num_machines, "disk_interval": disk_interval}
    whole |= {"peer_interval": peer_interval, "disk_interval_with_peers": rare}
    above = {"state_bytes": state_bytes, "machine_mtbf": machine_mtbf, "step": step}
    above |= {"disk_bandwidth": disk_bandwidth}
    least = {"restart": restart, "disk_blocking": disk_blocking or 0.0}
    least |= {"peer_overhead": peer_overhead, "peer_restore": peer_restore}
    for name, value in (whole | above | least).items():
        if name in whole and not (value >= 1 and value == int(value)):
            raise ValueError(f"{name} must be a whole number above 0, got {value}.")
        if name in above and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value}.")
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {value}.")
    if recovery is None:
        holders = place_replicas(range(num_machines), replicas)
        recovery = functools.partial(recovery_probability, holders, num_machines)
    lost_machines = lost_machines or {1: 1.0}
    for lost, probability in lost_machines.items():
        if not 0 <= lost <= num_machines or not 0 <= probability <= 1:
            raise ValueError(
                f"lost_machines must have probabilities of 0 to {num_machines} lost machines, got "
                f"{probability} for {lost}."
            )
    total = math.fsum(lost_machines.values())
    if not math.isclose(total, 1.0, rel_tol=1e-6):
        raise ValueError(f"the probabilities of lost_machines must add up to 1, got {total:g}.")
    recovered = min(1.0, math.fsum(p * recovery(lost) for lost, p in lost_machines.items()))

    transfer = state_bytes / disk_bandwidth
    from_disk, from_peers = restart + transfer, restart + peer_restore
    blocked, delay = (transfer, 0.0) if disk_blocking is None else (disk_blocking, transfer)
    failures = num_machines / machine_mtbf
    shortest = max(1, math.ceil((delay - blocked) / step))
    for name, interval in (("disk_interval", disk_interval), ("disk_interval_with_peers", rare)):
        if interval < shortest:
            raise ValueError(
                f"{name}={interval} steps are {seconds(interval * step + blocked)}, and writing a "
                f"checkpoint takes {seconds(delay)}: give at least {shortest} steps."
            )

    def on_disk(interval: int) -> CheckpointLoss:
        period = _Period(interval * step, blocked, delay)
        overhead, share = 1 - period.progress(), 1 - period.progress(failures, from_disk)
        return CheckpointLoss(interval, overhead, period.lost(from_disk), share)

    def is_long(interval: int) -> bool:
        """Whether one that loses least is shorter: it has 1 - exp(-f s - f b) = f s."""
        training = failures * interval * step
        return -math.expm1(-training - failures * blocked) <= training

    longest = int(min(1 / (failures * step), 2**60)) + 2
    best = bisect.bisect_left(range(longest), True, key=is_long)
    near = {max(shortest, best - 1), max(shortest, best)}
    snapshots = _Period(peer_interval * step, peer_overhead, peer_interval * step)
    # Failures that peers recover from slow steps down, and have blocked ones begin again.
    speed = snapshots.progress(failures * recovered, from_peers)
    again = _Period(blocked, 0.0, 0.0).progress(failures * recovered, from_peers) if blocked else 1
    files = _Period(rare * step / speed, blocked / again, delay) if speed and again else None
    pace = snapshots.progress()
    alone = _Period(rare * step / pace, blocked, delay)  # without failures
    peers = CheckpointLoss(
        peer_interval,
        1 - pace * alone.progress(),
        recovered * snapshots.lost(from_peers) + (1 - recovered) * alone.lost(from_disk),
        1 - speed * files.progress(failures * (1 - recovered), from_disk) if files else 1.0,
    )
    best_disk = min(map(on_disk, sorted(near)), key=lambda loss: loss.share)
    return LostTime(failures * 86_400, recovered, on_disk(disk_interval), best_disk, peers)
