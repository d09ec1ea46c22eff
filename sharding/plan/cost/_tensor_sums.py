"""What devices that share each layer sum over each other: how often, and how many bytes."""

import dataclasses

from sharding.pipeline import Op, Schedule
from sharding.pipeline._instructions import Code
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._pipeline_flops import over_ticks
from sharding.plan.model._models import Decoder
from sharding.plan.model._saved_names import saved_parts

SCALAR = 4  # bytes: losses are computed in 32 bits


@dataclasses.dataclass(frozen=True)
class TensorSums:
    """All-reduces of one micro-batch among the devices that share each layer."""

    forward: int  # of the residual stream in the forward pass of a layer
    backward: int  # of it in the backward pass of a layer, with those that recomputation repeats
    lookup: int  # of it where the embedding is sharded
    head: int  # of it in the backward pass of a sharded output matrix
    scalars: int  # of one number a token in the loss of sharded logits


def tensor_sums(
    model: Decoder, plan: ParallelPlan, *, compiled: bool = True, adds_first: bool = True
) -> TensorSums:
    """How often devices that share each layer sum the residual stream.

    Forward: after ``out`` and after ``down``. Backward: the gradients of the input of attention and
    of that of the MLP. Recomputation of a layer repeats the first sum, unless its result is saved;
    the second one is not needed again, and a compiled program leaves it out. A loss of sharded
    logits sums the exponentials and the logit of the label, and takes the maximum.

    Args:
      model: its dims.
      plan: how it is shared.
      compiled: whether a step is one compiled program.
      adds_first: whether gradients of one input, as by queries, keys and values, are added before
        they are summed over devices. XLA does so on GPUs and TPUs, not on CPUs.

    >>> from sharding.plan import MODELS
    >>> tensor_sums(MODELS["llama2-7b"], ParallelPlan(tensor=8, recompute="full"))
    TensorSums(forward=2, backward=3, lookup=1, head=1, scalars=3)
    """
    if plan.tensor == 1:
        return TensorSums(0, 0, 0, 0, 0)
    again = 1 if compiled else 2
    if plan.recompute in ("none", "selective") or "out" in saved_parts(plan.recompute):
        again = 0
    tables = int(model.shards_of_tokens(plan.tensor) > 1)
    inputs = 2 if adds_first else 3 + (2 if model.gated else 1)
    return TensorSums(2, inputs + again, tables, tables, 3 * tables)


def tensor_wire(
    model: Decoder,
    plan: ParallelPlan,
    *,
    length: int,
    itemsize: int,
    adds_first: bool = True,
    schedule: Schedule | None = None,
    rows: int = 0,
) -> float:
    """Bytes that one device of a compiled program sends for these sums in a step.

    In the ring convention: 2 (n - 1) / n of each array among n devices. Of a pipeline, the sums of
    each tick of its program, whose chunks have at most ``rows`` layers. There is no sequence
    parallelism; elements of the residual stream have ``itemsize`` bytes.
    """
    sums = tensor_sums(model, plan, adds_first=adds_first)
    stream = float(plan.microbatch * length * model.width * itemsize)
    head = sums.head * stream + sums.scalars * plan.microbatch * length * SCALAR

    def of(code: Code) -> float:
        if code.op == Op.WEIGHT:
            return 0.0
        if code.op == Op.FORWARD:
            return (rows * sums.forward + (sums.lookup if code.first else 0)) * stream
        # The last chunk runs its forward pass in its backward pass, beside the head.
        return rows * sums.backward * stream + (
            rows * sums.forward * stream + head if code.last else 0.0
        )

    if schedule is None:
        layers = model.layers * (sums.forward + sums.backward)
        nbytes = plan.microbatches * ((layers + sums.lookup) * stream + head)
    else:
        nbytes = over_ticks(schedule, of)
    return 2 * (plan.tensor - 1) / plan.tensor * nbytes
