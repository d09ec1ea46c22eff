"""What the program of a pipeline computes: known from its schedule, before anything is compiled."""

import dataclasses

from sharding.pipeline import Op, Schedule
from sharding.pipeline._instructions import Code, instructions
from sharding.plan._models import Decoder
from sharding.plan._saved_names import flops_again


def pipeline_flops(
    model: Decoder, schedule: Schedule, rows: int, *, microbatch: int, recompute: str
) -> float:
    """Operations of matrix products in a step's program, as ``audit`` counts them.

    All devices run one program. Each tick of its loops counts as its dearest branch, whatever a
    stage runs there, and each chunk as the one with most layers. Forward passes store residuals.

    Args:
      model: its dims.
      schedule: of the pipeline.
      rows: the most layers of a chunk.
      microbatch: its sequences.
      recompute: what the backward pass of a layer computes again; see ``ParallelPlan``.

    >>> from sharding.pipeline import one_f_one_b
    >>> from sharding.plan import MODELS
    >>> model = MODELS["llama2-7b"]
    >>> found = [
    ...     pipeline_flops(model, one_f_one_b(4, m), 8, microbatch=1, recompute="none")
    ...     for m in (8, 64)
    ... ]
    >>> [round(x * 4 / model.flops(2048.0 * m, 2048), 2) for x, m in zip(found, (8, 64))]
    [2.42, 1.51]
    """
    tokens = float(microbatch * model.length)
    none = dataclasses.replace(model, layers=0).flops(tokens, model.length)
    layer = (dataclasses.replace(model, layers=1).flops(tokens, model.length) - none) / 3
    again = 0.0 if recompute == "none" else tokens * flops_again(model, recompute, model.length)

    def of(code: Code) -> float:
        if code.op == Op.FORWARD:
            return rows * layer
        # The last chunk runs its forward pass in its backward pass, beside the head.
        return rows * (2 * layer + again) + (rows * layer + none if code.last else 0.0)

    return sum(
        len(segment.tables["code"]) * sum(max(map(of, phase.codes)) for phase in segment.phases)
        for segment in instructions(schedule, recompute=False).segments
    )
