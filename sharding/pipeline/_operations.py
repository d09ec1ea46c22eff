"""Operations of a pipeline, where they run, and what each one waits for."""

import dataclasses
import enum
from typing import NamedTuple


class Op(enum.IntEnum):
    """What a stage does in one tick."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2  # the full backward pass; where WEIGHT operations follow, that of the input alone
    WEIGHT = 3  # the rest of a split backward pass: the gradients of the parameters
    UPDATE = 4  # of the parameters, in an asynchronous pipeline


LETTERS = {Op.IDLE: ".", Op.FORWARD: "F", Op.BACKWARD: "B", Op.WEIGHT: "W", Op.UPDATE: "U"}


class Task(NamedTuple):
    """One operation on one micro-batch in one virtual stage."""

    op: Op
    microbatch: int
    virtual_stage: int

    def __str__(self) -> str:
        return f"{LETTERS[self.op]}{self.microbatch} of virtual stage {self.virtual_stage}"


class Place(NamedTuple):
    """Where a virtual stage runs: a stage of the mesh axis, and one of the chunks it holds."""

    stage: int
    chunk: int


# For each virtual stage, where it runs. Micro-batches on different routes run on different replicas
# of the layers (Chimera: one route down the devices, one up).
Route = tuple[Place, ...]

# An operation in the order of a stage: what it does, its micro-batch, its chunk.
Entry = tuple[Op, int, int]


class ScheduleError(ValueError):
    """A table that no pipeline can run; the message names the tick and the stage."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of one chunk's operations on one micro-batch, in any unit.

    Attributes:
      forward: of the forward pass.
      backward: of the full backward pass, recomputation included.
      weight: of ``WEIGHT``; ``backward`` then is that of the input alone.
      update: of ``UPDATE``.
    """

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 0.0
    update: float = 0.0

    def of(self, op: Op) -> float:
        """The time of one operation."""
        return (0.0, self.forward, self.backward, self.weight, self.update)[op]


def dependencies(task: Task, num_virtual_stages: int) -> list[Task]:
    """The operations that must be complete before ``task`` starts."""
    op, microbatch, v = task
    if op == Op.FORWARD:
        return [Task(op, microbatch, v - 1)] if v else []
    if op in (Op.WEIGHT, Op.UPDATE):
        return [Task(Op.BACKWARD, microbatch, v)]
    before = [Task(Op.FORWARD, microbatch, v)]
    if v + 1 < num_virtual_stages:
        before.append(Task(Op.BACKWARD, microbatch, v + 1))
    return before
