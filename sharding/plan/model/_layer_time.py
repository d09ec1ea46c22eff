"""The time of one layer of a decoder on one device: matrix products and passes over memory."""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping
from typing import Literal, NamedTuple

from sharding.plan.machine._devices import KINDS, Achieved, DeviceKind, achieved
from sharding.plan.model._models import Decoder
from sharding.plan.model._saved_names import saved_parts

# What fused attention reaches, relative to matrix products, without masked blocks: 0.50 of the peak
# on A100 and 0.42 on H100. Its kernels reach 0.50 to 0.73 on A100; on H100 0.35, and later forward
# passes 0.49 to 0.62 (Dao, FlashAttention-2, 2024; Shah et al., FlashAttention-3, 2024, figure 5).
_FUSED_ATTENTION = 0.63
# Its backward pass has five products of scores and values where the forward pass has two.
_FUSED_BACKWARD = 2.5
# Its seconds of matrix products, if ideal, are their operations.
OPERATIONS = dataclasses.replace(KINDS["h100"], flops=1.0)
_ITEM = 2  # bytes of an activation
_MASK = 1  # bytes of an element of a dropout mask


@dataclasses.dataclass(frozen=True)
class Implementation:
    """How a program computes a layer."""

    #: ``"materialized"`` writes all scores; ``"fused"`` keeps them on chip and skips masked blocks
    attention: Literal["materialized", "fused"] = "materialized"
    dropout: bool = False  #: whether there is dropout, on the scores and on both branches
    launch: float = 0.0  #: seconds in which the host issues a kernel; 0 for compiled steps
    attention_share: float = _FUSED_ATTENTION  #: of fused attention, relative to matrix products
    unfused: float = 1.0  #: bytes of element-wise operations, relative to kernels that fuse them
    collective_matmul: bool = False  #: whether products run beside ``sequence_parallel`` wires
    #: whether a step is one program: the ticks of a pipeline end on all devices at once, and a
    #: layer leaves out its last product when it is computed again; else stages wait for messages
    lockstep: bool = True


COMPILED = Implementation()


class KernelSeconds(NamedTuple):
    """Seconds of one device."""

    matmul: float = 0.0  # of matrix products, and of reading operands where that takes longer
    elementwise: float = 0.0  # of reading and writing memory in all other operations
    kernels: int = 0  # how many
    overhead: float = 0.0  # of the kernels, beside the above

    @property
    def seconds(self) -> float:
        return self.matmul + self.elementwise + self.overhead

    def __add__(self, other: "KernelSeconds") -> "KernelSeconds":  # type: ignore[override]
        return KernelSeconds(*map(operator.add, self, other))

    def __sub__(self, other: "KernelSeconds") -> "KernelSeconds":
        return self + other * -1

    def __mul__(self, times: float) -> "KernelSeconds":  # type: ignore[override]
        matmul, elementwise, kernels, overhead = self
        rounded = round(kernels * times)
        return KernelSeconds(matmul * times, elementwise * times, rounded, overhead * times)


class LayerWork(NamedTuple):
    forward: KernelSeconds  # its forward pass
    backward: KernelSeconds  # its backward pass, without recomputation
    weight: KernelSeconds  # the part of it that no other layer waits for: gradients of the matrices
    attention: KernelSeconds  # what selective recomputation runs again: scores to their product
    products: Mapping[str, KernelSeconds]  # of the forward pass, by ``SAVED_PARTS`` and ``"down"``

    def again(self, recompute: str, implementation: Implementation = COMPILED) -> KernelSeconds:
        """What the backward pass computes again; ``recompute`` as ``ParallelPlan`` has it."""
        if recompute == "none":
            return KernelSeconds()
        if recompute == "selective":
            return self.attention
        again = self.forward  # but for products that are saved, or whose result nothing reads
        for part in saved_parts(recompute):
            again -= self.products[part]
        return again - self.products["down"] if implementation.lockstep else again


class Roofline:
    """Seconds of operations on a device; if ``ideal``, of products alone, at the peak."""

    def __init__(self, device: DeviceKind, implementation: Implementation, *, ideal: bool = False):
        reached: Achieved = achieved(device)
        self.flops = device.flops * (1.0 if ideal else reached.matmul)
        self.attention_flops = self.flops * (1.0 if ideal else implementation.attention_share)
        self.bandwidth = math.inf if ideal else device.bandwidth * reached.memory
        self.kernel = 0.0 if ideal else reached.kernel
        self.unfused = implementation.unfused

    def matmul(self, rows: float, inner: float, cols: float, batch: float = 1.0) -> KernelSeconds:
        """A product of (rows, inner) and (inner, cols), ``batch`` times in one kernel."""
        flops = 2.0 * batch * rows * inner * cols
        nbytes = _ITEM * batch * (rows * inner + inner * cols + rows * cols)
        return KernelSeconds(flops / self.flops + nbytes / self.bandwidth, 0.0, 1, self.kernel)

    def passes(self, nbytes: float, kernels: int = 1) -> KernelSeconds:
        """Element-wise kernels that read and write so many bytes together."""
        seconds = self.unfused * nbytes / self.bandwidth
        return KernelSeconds(0.0, seconds, kernels, kernels * self.kernel)


@functools.lru_cache(maxsize=4096)
def layer_work(
    model: Decoder,
    device: DeviceKind,
    *,
    microbatch: int,
    length: int | None = None,
    tensor: int = 1,
    sequence_parallel: bool = False,
    implementation: Implementation = COMPILED,
    ideal: bool = False,
) -> LayerWork:
    """The time of one layer on one of ``tensor`` devices that share it.

    Matrix products take their operations at the typical share of the peak, and the reading and
    writing of their operands: the first tiles are read before products start, the last ones are
    written after them. Element-wise passes take their bytes, in 16 bits: norms and residuals of the
    stream, with dropout; the activation; a change of layout of queries, keys, values and their
    result; softmax and dropout of materialized scores. Backward passes read the inputs and the
    gradients of the same operations. With ``sequence_parallel`` norms and residuals are shared.

    References:
      Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models, MLSys 2023,
      arXiv 2205.05198, section 4. Isaev et al.: Calculon, SC 2023.
    """
    unit = Roofline(device, implementation, ideal=ideal)
    length = length or model.length
    tokens = microbatch * length
    up = model.matrices["up"].number
    products = {}
    forward = backward = weight = KernelSeconds()
    for part, (number, rows, columns) in model.matrices.items():
        shared = rows / tensor if part in ("out", "down") else columns / tensor
        inner, cols = (shared, columns) if part in ("out", "down") else (rows, shared)
        products[part] = unit.matmul(tokens, inner, cols) * number
        forward += products[part]
        backward += unit.matmul(tokens, cols, inner) * number
        weight += unit.matmul(inner, tokens, cols) * number
    backward += weight

    # Element-wise: norms and residuals of the stream, activations, layouts of attention.
    masks = _MASK if implementation.dropout else 0
    dropped = _ITEM * 2 + masks if implementation.dropout else 0
    stream = tokens * model.width / (tensor if sequence_parallel else 1)
    hidden = tokens * model.hidden / tensor
    heads = tokens * (2 * model.queries + 2 * model.keys) / tensor
    forward += unit.passes(2 * stream * (2 * _ITEM + 3 * _ITEM + masks), 4)
    backward += unit.passes(2 * stream * (4 * _ITEM + dropped), 6)
    forward += unit.passes(hidden * _ITEM * (up + 1))
    backward += unit.passes(hidden * _ITEM * (2 * up + 1))
    forward += unit.passes(heads * 2 * _ITEM, 4)
    backward += unit.passes(heads * 2 * _ITEM, 4)

    # Attention: scores, softmax and the product with the values.
    head, num_heads = model.queries // model.heads, microbatch * model.heads / tensor
    scores = num_heads * length * length
    if implementation.attention == "fused":
        products["context"] = KernelSeconds()  # nothing is spared
        flops = 4.0 * scores * head / 2  # half of the pairs is masked
        core = KernelSeconds(flops / unit.attention_flops, 0.0, 1, unit.kernel)
        core_backward = core._replace(matmul=_FUSED_BACKWARD * core.matmul)
    else:
        products["context"] = unit.matmul(length, length, head, num_heads)
        both = unit.matmul(length, head, length, num_heads) + products["context"]
        dropout = 2 * _ITEM + _MASK if implementation.dropout else 0
        core = both + unit.passes(scores * (2 * _ITEM + dropout), 2)
        core_backward = both * 2 + unit.passes(scores * (3 * _ITEM + dropout), 2)
    return LayerWork(forward + core, backward + core_backward, weight, core, products)


@functools.lru_cache(maxsize=4096)
def head_work(
    model: Decoder,
    device: DeviceKind,
    *,
    microbatch: int,
    length: int | None = None,
    tensor: int = 1,
    implementation: Implementation = COMPILED,
    ideal: bool = False,
) -> tuple[KernelSeconds, KernelSeconds]:
    """The output matrix and the loss, forward and backward; arguments as ``layer_work``.

    Logits are widened to 32 bits; a softmax reads and writes them, and so does its gradient.
    """
    unit = Roofline(device, implementation, ideal=ideal)
    tokens = microbatch * (length or model.length)
    rows, cols = model.width, model.vocabulary / tensor
    wide = 2 * _ITEM
    forward = unit.matmul(tokens, rows, cols) + unit.passes(tokens * cols * (_ITEM + 2 * wide), 2)
    backward = unit.matmul(tokens, cols, rows) + unit.matmul(rows, tokens, cols)
    return forward, backward + unit.passes(tokens * cols * (wide + _ITEM), 2)
