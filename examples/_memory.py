"""train_lm.py with --memory: what each block stores for its backward pass, and what runs again."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from _model import Block, TransformerLM
from _pipeline import token_losses
from _report import human_bytes

import sharding as shd
from sharding.plan import StagePlan


class PlannedBlocks(NamedTuple):
    """The blocks' plan, and what else a device holds at the peak of a step; all in bytes.

    Attributes:
      chain: the plan of the blocks.
      state: parameters, gradients, optimizer state and batch, as the plan of stages counts them.
      gathered: full parameters that stage 3 gathers, and their gradients; 0 at other stages.
      activations: the most that embedding, blocks, logits and loss take.
    """

    chain: shd.remat.ChainPlan
    state: float
    gathered: float
    activations: float

    def notes(self) -> list[str]:
        """Sentences below the table of the plan."""
        parts = [f"{human_bytes(self.state)} of state, gradients and batch"]
        if self.gathered:
            parts.append(f"{human_bytes(self.gathered)} that stage 3 gathers")
        parts.append(f"{human_bytes(self.activations)} of activations, with embedding and logits")
        total = human_bytes(self.state + self.gathered + self.activations)
        notes = [f"One device takes {total}: {', '.join(parts)}."]
        if self.gathered:
            notes.append(
                "Blocks that run again together are gathered more often than counted above."
            )
        if jax.default_backend() == "cpu":
            notes.append(
                "On CPUs XLA merges what should run again: the plan holds on accelerators only."
            )
        return notes


def plan_blocks(
    model: TransformerLM,
    params: Any,
    stage: StagePlan,
    memory: float,
    windows: int,
    device: jax.Device,
) -> PlannedBlocks:
    """The fastest way to train the model within the memory.

    Args:
      model: the model.
      params: its parameters, abstract.
      stage: what a device holds beside activations.
      memory: bytes of one device.
      windows: of one device's micro-batch.
      device: for which programs are compiled.

    Raises:
      OverBudgetError: if nothing fits.
    """
    block, shared = Block(model.config), outside_blocks(params)
    layers = [params[f"block_{i}"] for i in range(model.config.layers)]
    batch = jax.ShapeDtypeStruct((windows, model.config.context + 1), jnp.int32)

    def embed(shared: Any, batch: jax.Array) -> jax.Array:
        return model.apply({"params": shared}, batch[:, :-1], method="embed_tokens")

    def head(shared: Any, x: jax.Array, batch: jax.Array) -> jax.Array:
        logits = model.apply({"params": shared}, x, method="logits")
        return token_losses(logits, batch).mean()

    def embed_vjp(shared: Any, batch: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(lambda shared: embed(shared, batch), shared)[1](cotangent)

    # Embedding and logits run once; their programs are compiled for what they take by themselves.
    x = jax.eval_shape(embed, shared, batch)
    x_bytes = _num_bytes(x)
    embedding = _temporaries(embed_vjp, shared, batch, x, device=device)
    logits = _temporaries(jax.grad(head, argnums=(0, 1)), shared, x, batch, device=device)

    def activations(chain: shd.remat.ChainPlan) -> float:
        # Beside the input of the first block: the embedding's cotangent, the blocks, or the logits
        # beside all that is stored, with the input of the logits and its cotangent.
        return x_bytes + max(x_bytes + embedding, chain.peak, chain.saved + 2 * x_bytes + logits)

    gathered = 0.0
    if stage.name == "stage 3":  # what the step gathers stays; of the blocks there is one at a time
        gathered = 2.0 * (_num_bytes(shared) + _num_bytes(layers[0]))
    chains = shd.remat.frontier(
        lambda p, x: block.apply({"params": p}, x), layers, x, device=device
    )
    state = stage.memory + stage.unreduced
    left = memory - state - gathered
    fitting = [chain for chain in chains if activations(chain) <= left]
    if not fitting:
        held = human_bytes(state + gathered)
        least = state + gathered + min(map(activations, chains))
        raise shd.remat.OverBudgetError(
            f"--memory {human_bytes(memory)} is not enough: parameters, gradients and optimizer "
            f"state take {held} of a device, with the least activations {human_bytes(least)}."
        )
    chain = min(fitting, key=lambda chain: chain.extra_time)
    chain = dataclasses.replace(chain, budget=chain.peak + left - activations(chain))
    return PlannedBlocks(chain, state, gathered, activations(chain))


def planned_logits(
    model: TransformerLM, chain: shd.remat.ChainPlan, zero: shd.Zero
) -> Callable[[Any, jax.Array], jax.Array]:
    """``logits(params, tokens)``: the model, with its blocks run as planned."""
    run_blocks = chain.apply(zero)

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        shared = {"params": outside_blocks(params)}
        x = model.apply(shared, tokens, method="embed_tokens")
        x = run_blocks([params[f"block_{i}"] for i in range(model.config.layers)], x)
        return model.apply(shared, x, method="logits")

    return logits


def outside_blocks(params: Any) -> Any:
    """The parameters of embedding and logits."""
    return {name: p for name, p in params.items() if not name.startswith("block_")}


def _temporaries(fn: Callable[..., Any], *args: Any, device: jax.Device) -> float:
    """Bytes that a program takes beside its arguments and results."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: x.update(sharding=sharding), args)
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def _num_bytes(tree: Any) -> float:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
