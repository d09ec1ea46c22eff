"""Schedules of a pipeline in closed form: micro-batches in flight, bubble, time of a step."""

SCHEDULES = ("gpipe", "1f1b", "aligned", "interleaved")


def check_schedule(schedule: str, num_stages: int, microbatches: int, chunks: int = 1) -> None:
    """Raises unless the schedule exists and takes these numbers."""
    if schedule not in SCHEDULES:
        known = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"schedule must be one of {known}, got {schedule!r}.")
    if min(num_stages, microbatches, chunks) < 1:
        raise ValueError(
            f"stages, micro-batches and chunks must be at least 1, got {num_stages}, "
            f"{microbatches} and {chunks}."
        )
    if schedule != "interleaved" and chunks != 1:
        raise ValueError(f"schedule {schedule!r} has one chunk on a device, got chunks={chunks}.")
    if schedule == "interleaved" and microbatches % num_stages:
        raise ValueError(
            f"schedule 'interleaved' needs micro-batches in multiples of its {num_stages} stages, "
            f"got {microbatches}; {-(-microbatches // num_stages) * num_stages} are possible."
        )


def max_in_flight(
    schedule: str, num_stages: int, stage: int, microbatches: int, chunks: int = 1
) -> int:
    """How many micro-batches have activations on a stage at once; chunks where it has several.

    With S stages and M micro-batches, on stage s: M for ``gpipe``; S - s for ``1f1b``, which is
    DAPPLE's; 2 (S - 1 - s) + 1 for ``aligned``, 1F1B with forward passes on even ticks only; and
    2 (S - 1 - s) + (V - 1) S + 1 of V chunks for ``interleaved``; never more than there are.

    >>> [max_in_flight("aligned", 4, stage, 8) for stage in range(4)]
    [7, 5, 3, 1]

    References:
      Huang et al.: GPipe, NeurIPS 2019. Fan et al.: DAPPLE, PPoPP 2021. Narayanan et al.: Efficient
      Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021.
    """
    check_schedule(schedule, num_stages, microbatches, chunks)
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b":
        return min(num_stages - stage, microbatches)
    warm_up = 2 * (num_stages - 1 - stage) + (chunks - 1) * num_stages
    return min(warm_up + 1, chunks * microbatches)


def bubble_share(schedule: str, num_stages: int, microbatches: int, chunks: int = 1) -> float:
    """The idle share of a step whose stages take equal times: (S - 1) / (V M + S - 1).

    >>> bubble_share("aligned", 4, 12), bubble_share("interleaved", 4, 12, chunks=2)
    (0.2, 0.1111111111111111)
    """
    check_schedule(schedule, num_stages, microbatches, chunks)
    return (num_stages - 1) / (chunks * microbatches + num_stages - 1)


def lockstep_seconds(
    schedule: str,
    num_stages: int,
    microbatches: int,
    forward: float,
    backward: float,
    chunks: int = 1,
) -> float:
    """The time of a step whose ticks end on all devices at once, without transfers.

    A tick lasts as long as its slowest operation. ``gpipe``, ``aligned`` and ``interleaved`` have
    either forward or backward passes in a tick: (V M + S - 1) (F + B). ``1f1b`` has both in every
    tick but its first S, in which there are forward passes only: S F + (2 M + S - 2) max(F, B).

    Args:
      schedule: its name.
      num_stages: S, devices in a pipeline.
      microbatches: M.
      forward: F, seconds of the slowest chunk.
      backward: B, of the slowest chunk.
      chunks: V, on each device.

    >>> lockstep_seconds("aligned", 4, 8, 1, 2), lockstep_seconds("1f1b", 4, 8, 1, 2)
    (33, 40)
    """
    check_schedule(schedule, num_stages, microbatches, chunks)
    if schedule == "1f1b":
        both = max(forward, backward)
        return num_stages * forward + (2 * microbatches + num_stages - 2) * both
    return (chunks * microbatches + num_stages - 1) * (forward + backward)


def num_ticks(schedule: str, num_stages: int, microbatches: int, chunks: int = 1) -> int:
    """Ticks in which some device computes: twice (V M + S - 1).

    >>> num_ticks("aligned", 4, 8), num_ticks("interleaved", 4, 8, chunks=2)
    (22, 38)
    """
    check_schedule(schedule, num_stages, microbatches, chunks)
    return 2 * (chunks * microbatches + num_stages - 1)
