"""train_lm.py with --pipeline: the model as the stages of a pipeline, its checkpoints without."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _model import Block, TransformerLM

import sharding as shd
from sharding.pipeline import Schedule, chimera, gpipe, interleaved, one_f_one_b, zb_h1, zb_v

# Each schedule as a function of the numbers of stages and of micro-batches.
SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,  # two groups of layers per stage
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "chimera": chimera,
}


def token_losses(logits: jax.Array, windows: jax.Array) -> jax.Array:
    """The loss of each token after the first, (batch, length)."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])


def make_pipeline(
    model: TransformerLM,
    mesh: jax.sharding.Mesh,
    schedule: Schedule,
    layers: Sequence[int] | None = None,
    recompute: str = "stage",
    policy: Any = None,
) -> shd.Pipeline:
    """The model's loss as a pipeline over the mesh axis ``"pipe"``.

    ``layers`` are those of each virtual stage; None: as equal as possible. Backward passes compute
    a ``"stage"`` again from its input, or each ``"layer"`` but for what ``policy`` stores; ``""``:
    nothing.
    """

    def block(layer: Any, x: jax.Array, _: jax.Array) -> jax.Array:
        return Block(model.config).apply({"params": layer}, x)

    def embed(shared: Any, windows: jax.Array) -> jax.Array:
        return model.apply({"params": shared}, windows[:, :-1], method="embed_tokens")

    def head(shared: Any, x: jax.Array, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses = token_losses(model.apply({"params": shared}, x, method="logits"), windows)
        return jnp.sum(losses), jnp.float32(losses.size)

    return shd.Pipeline(
        mesh,
        schedule,
        num_layers=layers or model.config.layers,
        embed=embed,
        block=jax.checkpoint(block, policy=policy) if recompute == "layer" else block,
        head=head,
        numbered="block_{}",
        recompute=recompute == "stage",
    )


class CheckpointForm:
    """Converts a pipeline's train state to that of the model without a pipeline, and back.

    Checkpoints hold the latter, so that a run resumes with any number of stages, or none. Beside
    the state, a conversion needs the state once more, sharded over all devices.

    Attributes:
      make_state: makes the state of the model.
      zero: shards it over all devices.
    """

    def __init__(self, pipeline: shd.Pipeline, make_state: Callable[..., Any], *args: Any):
        """``make_state(*args)`` makes the state of the model."""
        mesh = pipeline.mesh
        self.make_state = make_state
        self.zero = shd.Zero(mesh, stage=3, axis=tuple(mesh.axis_names))
        self._pipeline = pipeline
        shardings = _shardings(self.zero.abstract_state(make_state, *args))
        self._unstack = jax.jit(pipeline.unstack, out_shardings=shardings)

    def of(self, state: Any) -> Any:
        """The state of the model."""
        return self._unstack(jax.tree.map(_on_device, state))

    def to_stages(self, state: Any, target: Any) -> Any:
        """The inverse of ``of``; ``target`` is the abstract state of the pipeline."""
        return jax.jit(self._pipeline.stack, out_shardings=_shardings(target))(state)


def _on_device(x: jax.Array) -> jax.Array:
    """The array, in device memory if it is offloaded."""
    if x.sharding.memory_kind != "pinned_host":
        return x
    return jax.device_put(x, x.sharding.with_memory_kind("device"))


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, abstract)
