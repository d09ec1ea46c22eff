"""What the program of a pipeline does in all of its ticks."""

from collections.abc import Callable

from sharding.pipeline import Schedule
from sharding.pipeline._instructions import Code, instructions


def over_ticks(schedule: Schedule, of: Callable[[Code], float]) -> float:
    """The sum over all ticks of what their dearest branch takes.

    All devices run one program, and each tick of its loops counts as its dearest branch, whatever a
    stage runs there. Forward passes store residuals.

    >>> from sharding.pipeline import one_f_one_b
    >>> [over_ticks(one_f_one_b(4, m), lambda code: 1.0) for m in (8, 64)]
    [28.0, 140.0]
    """
    return sum(
        len(segment.tables["code"]) * sum(max(map(of, phase.codes)) for phase in segment.phases)
        for segment in instructions(schedule, recompute=False).segments
    )
