"""What a layer of a decoder takes on one device: time of products and passes over memory; bytes."""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from sharding._types import Array, Batch, DType
from sharding.matmuls._quantized_loss import MIN_SIZE, quantized_matmuls
from sharding.pipeline._stage import LayerParams, Scope, Stage
from sharding.plan.machine._devices import KINDS, Achieved, DeviceKind, achieved, num_bytes
from sharding.plan.model._models import Decoder, saved_elements, saved_parts
from sharding.plan.model._traced_work import products_of, stored_by

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
    """Seconds of operations on a device; if ``ideal``, of products alone, at the peak.

    Products in ``matmuls``, ``"fp8"`` or ``"int8"``, are taken to reach the same share of theirs.
    """

    def __init__(
        self,
        device: DeviceKind,
        implementation: Implementation,
        *,
        ideal: bool = False,
        matmuls: str | None = None,
    ):
        reached: Achieved = achieved(device)
        self.flops = device.rate(matmuls) * (1.0 if ideal else reached.matmul)
        self.item = 1 if matmuls else _ITEM  # bytes of an operand
        # Bytes of each element that is quantized, as programs for H100 and v5e move: GPUs find the
        # largest of a row where it is made, TPUs read it once more.
        self.quantizing = (_ITEM + 1 + (_ITEM if device.tile else 0)) if matmuls else 0
        self.attention_flops = self.flops * (1.0 if ideal else implementation.attention_share)
        self.bandwidth = math.inf if ideal else device.bandwidth * reached.passes
        share = reached.operands or reached.passes
        self.operands = math.inf if ideal else device.bandwidth * share
        flops, nbytes = (1.0, 1.0) if ideal else reached.convolutions
        self.convolutions, self.images = self.flops * flops, self.operands * nbytes
        self.new_memory = 0.0 if ideal else reached.new_memory
        self.kernel = 0.0 if ideal else reached.kernel
        self.unfused = implementation.unfused

    def matmul(self, rows: float, inner: float, cols: float, batch: float = 1.0) -> KernelSeconds:
        """A product of (rows, inner) and (inner, cols), ``batch`` times in one kernel."""
        flops = 2.0 * batch * rows * inner * cols
        nbytes = batch * (self.item * (rows + cols) * inner + _ITEM * rows * cols)
        return KernelSeconds(flops / self.flops + nbytes / self.operands, 0.0, 1, self.kernel)

    def quantize(self, elements: float) -> KernelSeconds:
        """So many elements of operands become codes, where products are in few bits."""
        return self.passes(elements * self.quantizing) if self.quantizing else KernelSeconds()

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
    experts: int = 1,
    sequence_parallel: bool = False,
    implementation: Implementation = COMPILED,
    ideal: bool = False,
    matmuls: str | None = None,
) -> LayerWork:
    """The time of one layer on one of ``tensor`` devices that share it, or its ``experts``.

    Matrix products take their operations at the typical share of the peak, and the reading and
    writing of their operands: the first tiles are read before products start, the last ones are
    written after them. Element-wise passes take their bytes, in 16 bits: norms and residuals of the
    stream, with dropout; the activation; a change of layout of queries, keys, values and their
    result; softmax and dropout of materialized scores. Backward passes read the inputs and the
    gradients of the same operations. With ``sequence_parallel`` norms and residuals are shared.
    Slots of experts are read and written on the way to the experts and back.
    ``matmuls`` are products in few bits, ``"fp8"`` or ``"int8"``: those with matrices.

    References:
      Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models, MLSys 2023,
      arXiv 2205.05198, section 4. Isaev et al.: Calculon, SC 2023.
    """
    if model.dense_layers:
        kinds: Any = {"microbatch": microbatch, "length": length, "experts": experts}
        kinds |= {"implementation": implementation, "ideal": ideal, "matmuls": matmuls}
        single = dataclasses.replace(model, experts=None)
        works = [layer_work(kind, device, **kinds) for kind in (single, model.alone)]
        return _mean_of(works, model.dense_layers / model.layers)
    unit = Roofline(device, implementation, ideal=ideal)
    low = Roofline(device, implementation, ideal=ideal, matmuls=matmuls)
    length = length or model.length
    tokens = microbatch * length
    up = model.matrices["up"][0].number
    forward, backward, weight, products = _products_of_layer(
        model, unit, low, tokens, tensor, experts
    )

    # Element-wise: norms and residuals of the stream, activations, layouts of attention.
    masks = _MASK if implementation.dropout else 0
    dropped = _ITEM * 2 + masks if implementation.dropout else 0
    stream = tokens * model.width / (tensor if sequence_parallel else 1)
    slots = [(x.columns, x.experts * x.share * x.padding) for x in model.matrices["up"]]
    hidden = tokens * sum(columns * each for columns, each in slots) / tensor
    if model.experts:
        to_experts = unit.passes(4 * tokens * slots[0][1] * model.width * _ITEM, 2)
        forward += to_experts
        backward += to_experts
    heads = tokens * (2 * model.queries + 2 * model.keys) / tensor
    forward += unit.passes(2 * stream * (2 * _ITEM + 3 * _ITEM + masks), 4)
    backward += unit.passes(2 * stream * (4 * _ITEM + dropped), 6)
    forward += unit.passes(hidden * _ITEM * (up + 1))
    backward += unit.passes(hidden * _ITEM * (2 * up + 1))
    forward += unit.passes(heads * 2 * _ITEM, 4)
    backward += unit.passes(heads * 2 * _ITEM, 4)

    # Attention: scores, softmax and the product with the values.
    head = model.queries // model.heads
    num_heads = microbatch * model.heads / tensor
    scores = num_heads * length * length
    if implementation.attention == "fused":
        products["context"] = KernelSeconds()  # nothing is spared
        flops = 2.0 * scores * (model.score_dim + head) / 2  # half of the pairs is masked
        core = KernelSeconds(flops / unit.attention_flops, 0.0, 1, unit.kernel)
        core_backward = core._replace(matmul=_FUSED_BACKWARD * core.matmul)
    else:
        products["context"] = unit.matmul(length, length, head, num_heads)
        both = unit.matmul(length, model.score_dim, length, num_heads) + products["context"]
        dropout = 2 * _ITEM + _MASK if implementation.dropout else 0
        core = both + unit.passes(scores * (2 * _ITEM + dropout), 2)
        core_backward = both * 2 + unit.passes(scores * (3 * _ITEM + dropout), 2)
    return LayerWork(forward + core, backward + core_backward, weight, core, products)


def _products_of_layer(
    model: Decoder, unit: Roofline, low: Roofline, tokens: int, tensor: int, experts: int
) -> tuple[KernelSeconds, KernelSeconds, KernelSeconds, dict[str, KernelSeconds]]:
    """The matrices of a layer: forward pass, backward pass, its gradients of matrices, each part.

    ``low`` is for products in few bits, which small ones are not.
    """
    products = dict.fromkeys(model.matrices, KernelSeconds())
    forward = backward = weight = KernelSeconds()
    for part, several in model.matrices.items():
        by_rows = part in ("out", "down")
        for x in several:
            inner = x.rows / (tensor if by_rows else 1)
            cols = x.columns / (1 if by_rows else tensor)
            devices = experts if x.experts > 1 else 1
            rows = tokens * devices * x.share * x.padding
            each = x.experts / devices
            of_part = low if min(rows, inner, cols) >= MIN_SIZE else unit
            product = of_part.matmul(rows, inner, cols, each) * x.number
            read = rows * inner + x.number * inner * cols
            forward += product + of_part.quantize(each * read)
            backward += of_part.matmul(rows, cols, inner, each) * x.number
            # For each of its two products.
            backward += of_part.quantize(2 * x.number * each * rows * cols)
            weight += of_part.matmul(inner, rows, cols, each) * x.number
            # What experts make is read again, for the gradients of their weights.
            products[part] += KernelSeconds() if x.experts > 1 and by_rows else product
    return forward, backward + weight, weight, products


def _mean_of(works: Sequence[LayerWork], share: float) -> LayerWork:
    """Of two kinds of layers, of which the first has so large a share."""
    first, second = works

    def mean(one: KernelSeconds, other: KernelSeconds) -> KernelSeconds:
        return one * share + other * (1 - share)

    passes: list[Any] = [*map(mean, first[:-1], second[:-1])]
    none = KernelSeconds()
    products = {x: mean(first.products.get(x, none), y) for x, y in second.products.items()}
    return LayerWork._make([*passes, products])


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
    rows = model.width
    cols = model.vocabulary / tensor
    wide = 2 * _ITEM
    forward = unit.matmul(tokens, rows, cols) + unit.passes(tokens * cols * (_ITEM + 2 * wide), 2)
    backward = unit.matmul(tokens, cols, rows) + unit.matmul(rows, tokens, cols)
    return forward, backward + unit.passes(tokens * cols * (wide + _ITEM), 2)


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """One layer, for one micro-batch."""

    forward: float  #: seconds of the forward pass
    backward: float  #: seconds of the backward pass, with recomputation where the layer recomputes
    param_bytes: float = 0.0  #: of its parameters
    activation_bytes: float = 0.0  #: of what the forward pass stores for the backward pass
    output_bytes: float = 0.0  #: to the next layer; as many bytes of gradients come back
    working_bytes: float = 0.0  #: of temporaries of the backward pass beside ``activation_bytes``
    #: of what the second half of a split backward pass needs, if nothing is computed again
    crossing_bytes: float = 0.0


class Activations(NamedTuple):
    """Bytes of one micro-batch on one device, beside parameters and their gradients."""

    stored: float  #: by the forward pass, for the backward pass
    working: float = 0.0  #: temporaries of the backward pass of a layer
    head: float = 0.0  #: temporaries of what follows the layers, such as logits
    logits: float = 0.0  #: the gradient of the logits, until that of their matrix is made of it
    copied: float = 0.0  #: parameters in another layout, if a device stores all


def activations_of(
    model: Decoder,
    device: DeviceKind,
    costs: Sequence["LayerCost"],
    tensor: int = 1,
    experts: int = 1,
) -> Activations:
    """Activations without a pipeline; all other arguments are those of the ``costs``.

    >>> from sharding.plan import MODELS, kind_of
    >>> model, device = MODELS["llama2-7b"], kind_of("h100")
    >>> round(activations_of(model, device, layer_costs(model, device)).stored / 2**20)
    528
    """
    first, *layers, last = costs
    stored = sum(x.activation_bytes for x in costs)
    working = max(x.working_bytes for x in layers)
    logits = first.activation_bytes * (model.vocabulary // model.shards_of_tokens(tensor))
    gradient = last.activation_bytes + last.working_bytes - first.output_bytes - logits
    if device.tile:
        # The gradient of the logits has 32 bits, too, and is gone before the layers. Matrices of
        # queries, keys and values of all layers are transposed before the first one.
        share = sum(x.elements for x in model.matrices["qkv"]) / model.elements_of_device(experts)
        copied = share * sum(cost.param_bytes for cost in layers)
        return Activations(stored, working, last.working_bytes + logits - gradient, 0.0, copied)
    # The parameters of a layer are taken out of the stack ahead; an odd output matrix is padded.
    ahead = layers[0].param_bytes + (last.param_bytes if model.vocabulary % 8 else 0.0)
    return Activations(stored, working, last.working_bytes + ahead, gradient)


@functools.lru_cache(maxsize=256)
def _layer_bytes(
    model: Decoder, batch: int, length: int, dtype: DType, tensor: int, matmuls: str | None
) -> tuple[float, tuple[float, ...]]:
    """Bytes that a layer stores if nothing is computed again, and of what its products touch."""
    layer, x = _layer_and_input(model, batch, length, dtype, tensor)
    run = _run_of(model, matmuls)
    products = products_of(run, layer, x)
    stored = stored_by(run, layer, x)
    return float(num_bytes(stored)), tuple(float(num_bytes(x)) for x in products)


def _run_of(model: Decoder, matmuls: str | None) -> Any:
    """A layer, ``run(params, x)``."""
    return quantized_matmuls(model.apply_layer, matmuls) if matmuls else model.apply_layer


def _layer_and_input(
    model: Decoder, batch: int, length: int, dtype: DType, tensor: int
) -> tuple[Any, Any]:
    """The types of a layer's parameters on one device, and of its input."""
    (layer,) = model.alone.abstract(dtype, tensor)["layers"]
    return layer, jax.ShapeDtypeStruct((batch, length, model.width), dtype)


@functools.lru_cache(maxsize=256)
def _crossing_bytes(
    model: Decoder, batch: int, length: int, dtype: DType, tensor: int, matmuls: str | None
) -> float:
    """Bytes that the gradients of parameters need, once that of the input is there."""
    params, x = _layer_and_input(model, batch, length, dtype, tensor)
    run = _run_of(model, matmuls)
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)

    def layer(params: LayerParams, x: Array, microbatch: Batch, key: Any) -> Any:
        del microbatch, key
        return run(treedef.unflatten(params.trained), x)

    def backward(leaves: Any, x: Array) -> Any:
        stage = Stage(layer, num_layers=1, uneven=False)
        params = LayerParams([leaf[None] for leaf in leaves], [])
        scope = Scope((), None, 0, 1)
        y, residuals = stage.forward_storing(params, x, scope)
        return stage.backward_input(params, residuals, y, scope)[1]

    return float(num_bytes(jax.eval_shape(backward, leaves, x)))


def layer_costs(
    model: Decoder,
    device: DeviceKind,
    *,
    batch: int = 1,
    length: int | None = None,
    dtype: DType = jnp.bfloat16,
    recompute: bool | str = True,
    tensor: int = 1,
    experts: int = 1,
    matmuls: str | None = None,
) -> list[LayerCost]:
    """The embedding, the decoder layers and the head of one of ``MODELS``, ``layers + 2`` costs.

    Seconds are those of ``step_seconds`` without wires, for 16 bits: with ``recompute`` backward
    passes have what is computed again. Lookups in the embedding take no time. Activations are those
    that the vector-Jacobian product of the layer's code stores, without its parameters; attention
    materializes its scores. What is computed again is a temporary of the backward pass. A tied
    embedding counts as parameters of the head, too.

    Args:
      model: one of ``MODELS``.
      device: its figures.
      batch: sequences in a micro-batch.
      length: tokens of a sequence; None: the model's.
      dtype: of parameters and activations.
      recompute: whether each layer stores its input only; or as ``ParallelPlan`` has it, as
        ``"minimal"``, a preset of MaxText, whose values it stores, too.
      tensor: devices that share each layer by ``Decoder.specs``; costs are those of one of them.
      experts: devices that share the experts of each layer, likewise.
      matmuls: the recipe of the products of layers, ``"fp8"`` or ``"int8"``; None: as they are.

    Raises:
      ValueError: so many devices cannot share the model.

    >>> from sharding.plan import MODELS, kind_of
    >>> costs = layer_costs(MODELS["llama2-7b"], kind_of("v5p:2x2x1"))
    >>> len(costs), round(1e3 * costs[1].forward, 1), round(costs[1].param_bytes / 2**20)
    (34, 3.4, 386)
    """
    length = length or model.length
    tokens = batch * length
    itemsize = jnp.dtype(dtype).itemsize
    stream = float(tokens * model.width * itemsize)  # bytes of the residual stream

    # Parameters.
    params = model.alone.abstract(dtype, tensor, experts)
    embedding = float(num_bytes([params["embed"], params.get("positions", ())]))
    head = float(num_bytes([params["norm"], params["embed" if model.tied else "unembed"]]))

    # Seconds.
    form = recompute if isinstance(recompute, str) else "full" if recompute else "none"
    options: Any = {"microbatch": batch, "length": length}
    sizes: Any = {"tensor": tensor, "experts": experts, "matmuls": matmuls}
    work = layer_work(model, device, **sizes, **options)
    shards = model.shards_of_tokens(tensor)
    head_forward, head_backward = head_work(model, device, tensor=shards, **options)

    # Activations.
    traced = (model, batch, length, jnp.dtype(dtype), tensor, matmuls)
    full, products = _layer_bytes(*traced)
    largest = max(products)
    vocabulary = model.vocabulary // shards
    logits = 4.0 * tokens * vocabulary  # float32, for the backward pass of the loss
    gradient = float(itemsize * tokens * vocabulary)  # of the logits

    # What a layer stores beside its input.
    kept = full - stream
    again = form != "none"
    if again:
        kept = float(tokens * itemsize * saved_elements(model, form, tensor))
    # Temporaries: the gradient of what is largest, in 32 bits where nothing is computed again; what
    # products read and write that is computed again. Element-wise operations are fused.
    working = sum(products) - kept + largest if again else largest * 4 / itemsize
    return [
        LayerCost(0.0, 0.0, embedding, 4.0 * tokens, stream),
        *[
            LayerCost(
                forward=work.forward.seconds,
                backward=(work.backward + work.again(form)).seconds,
                param_bytes=float(num_bytes(params["layers"])),
                activation_bytes=stream + kept,
                output_bytes=stream,
                working_bytes=working,
                crossing_bytes=0.0 if again else _crossing_bytes(*traced),
            )
        ]
        * model.layers,
        LayerCost(
            forward=head_forward.seconds,
            backward=head_backward.seconds,
            param_bytes=head,
            activation_bytes=stream if again else stream + logits,
            working_bytes=gradient + (logits if again else 0.0),
        ),
    ]
