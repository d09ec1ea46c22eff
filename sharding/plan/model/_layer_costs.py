"""What one layer costs a pipeline: the input of every planner of stages."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sharding._types import Array, Batch, DType
from sharding.pipeline._stage import LayerParams, Scope, Stage
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._layer_time import head_work, layer_work
from sharding.plan.model._models import Decoder
from sharding.plan.model._saved_names import saved_elements
from sharding.plan.model._traced_model import products_of, stored_by


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
    model: Decoder, device: DeviceKind, costs: Sequence["LayerCost"], tensor: int = 1
) -> Activations:
    """The activations of ``layer_costs``, in a program without a pipeline."""
    first, *layers, last = costs
    stored, working = sum(x.activation_bytes for x in costs), max(x.working_bytes for x in layers)
    logits = first.activation_bytes * (model.vocabulary // model.shards_of_tokens(tensor))
    gradient = last.activation_bytes + last.working_bytes - first.output_bytes - logits
    if device.tile:
        # The gradient of the logits has 32 bits, too, and is gone before the layers. Matrices of
        # queries, keys and values of all layers are transposed before the first one.
        share = math.prod(model.matrices["qkv"]) / model.layer_elements
        copied = share * sum(cost.param_bytes for cost in layers)
        return Activations(stored, working, last.working_bytes + logits - gradient, 0.0, copied)
    # The parameters of a layer are taken out of the stack ahead; an odd output matrix is padded.
    ahead = layers[0].param_bytes + (last.param_bytes if model.vocabulary % 8 else 0.0)
    return Activations(stored, working, last.working_bytes + ahead, gradient)


def check_layers(layers: Sequence[LayerCost], num_stages: int = 1) -> None:
    """Raises unless each stage gets a layer, and every cost is a number of at least 0."""
    if not layers:
        raise ValueError("layers are empty; a pipeline needs at least one layer.")
    for i, layer in enumerate(layers):
        for name, value in dataclasses.asdict(layer).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"layer {i}: {name} must be finite and at least 0, got {value}.")
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, got {num_stages}.")
    if num_stages > len(layers):
        raise ValueError(
            f"{num_stages} stages were requested of {len(layers)} layers; each stage needs a "
            f"layer, so that at most {len(layers)} stages are possible."
        )


@functools.lru_cache(maxsize=256)
def _layer_bytes(
    model: Decoder, batch: int, length: int, dtype: DType, tensor: int
) -> tuple[float, tuple[float, ...]]:
    """Bytes that a layer stores if nothing is computed again, and of what its products touch."""
    layer, x = _layer_and_input(model, batch, length, dtype, tensor)
    products = products_of(model.apply_layer, layer, x)
    stored = stored_by(model.apply_layer, layer, x)
    return float(num_bytes(stored)), tuple(float(num_bytes(x)) for x in products)


def _layer_and_input(
    model: Decoder, batch: int, length: int, dtype: DType, tensor: int
) -> tuple[Any, Any]:
    """The types of a layer's parameters on one device, and of its input."""
    (layer,) = dataclasses.replace(model, scan=False, layers=1).abstract(dtype, tensor)["layers"]
    return layer, jax.ShapeDtypeStruct((batch, length, model.width), dtype)


@functools.lru_cache(maxsize=256)
def _crossing_bytes(model: Decoder, batch: int, length: int, dtype: DType, tensor: int) -> float:
    """Bytes that the gradients of parameters need, once that of the input is there."""
    params, x = _layer_and_input(model, batch, length, dtype, tensor)
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)

    def layer(params: LayerParams, x: Array, microbatch: Batch, key: Any) -> Any:
        del microbatch, key
        return model.apply_layer(treedef.unflatten(params.trained), x)

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
    params = dataclasses.replace(model, scan=False, layers=1).abstract(dtype, tensor)
    embedding = float(num_bytes([params["embed"], params.get("positions", ())]))
    head = float(num_bytes([params["norm"], params["embed" if model.tied else "unembed"]]))

    # Seconds.
    form = recompute if isinstance(recompute, str) else "full" if recompute else "none"
    options: Any = {"microbatch": batch, "length": length}
    work = layer_work(model, device, tensor=tensor, **options)
    shards = model.shards_of_tokens(tensor)
    head_forward, head_backward = head_work(model, device, tensor=shards, **options)

    # Activations.
    traced = (model, batch, length, jnp.dtype(dtype), tensor)
    full, products = _layer_bytes(*traced)
    largest = max(products)
    vocabulary = model.vocabulary // shards
    logits = 4.0 * tokens * vocabulary  # float32, for the backward pass of the loss
    gradient = float(itemsize * tokens * vocabulary)  # of the logits

    # What a layer stores beside its input.
    kept, again = full - stream, form != "none"
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
