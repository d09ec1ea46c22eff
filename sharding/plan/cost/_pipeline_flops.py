"""What the program of a pipeline computes: known from its schedule, before anything is compiled."""

from collections.abc import Callable

from sharding.pipeline import Op, Schedule
from sharding.pipeline._instructions import Code, instructions
from sharding.plan.model._models import Decoder
from sharding.plan.model._saved_names import attention_flops, flops_again


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


def pipeline_flops(
    model: Decoder,
    schedule: Schedule,
    rows: int,
    *,
    microbatch: int,
    recompute: str,
    tensor: int = 1,
) -> float:
    """Operations of matrix products in a step's program, as ``audit`` counts them.

    Each tick counts as ``over_ticks`` says, and each chunk as the one with most layers.

    Args:
      model: its dims.
      schedule: of the pipeline.
      rows: the most layers of a chunk.
      microbatch: its sequences.
      recompute: what the backward pass of a layer computes again; see ``ParallelPlan``.
      tensor: devices that share each layer; operations are those of one of them.

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
    of_layer, head = model.layer_flops(tokens, model.length)
    layer = of_layer / 3 / tensor
    # Of a split backward pass gradients of matrices are the second half.
    weight = layer - tokens * attention_flops(model, model.length) / tensor
    first = 2 * layer - (weight if schedule.splits_backward else 0.0)
    again = 0.0 if recompute == "none" else tokens * flops_again(model, recompute, model.length)
    again /= tensor
    head /= model.shards_of_tokens(tensor)

    def of(code: Code) -> float:
        if code.op == Op.FORWARD:
            return rows * layer
        if code.op == Op.UPDATE:
            return 0.0
        if code.op == Op.WEIGHT:
            return rows * weight
        # The last chunk runs its forward pass in its backward pass, beside the head.
        return rows * (first + again) + (rows * layer + head if code.last else 0.0)

    return over_ticks(schedule, of)
