"""A training step of GPT-2 small: tokens per second, and the optimizer's share of it.

CAME and AdamW in optax alone and in PyTorch, where it is installed; and under ZeRO stage 2 on all
devices. They take turns on the same tokens, those that fit into memory at once, each time beside
optax alone with AdamW. The optimizer's share is the time of its update alone, with gradients at
hand, over that of the step.

  python benchmarks/training_step.py           # writes benchmarks/results/training_step_cpu.md
  python benchmarks/training_step.py --platform gpu
  python benchmarks/training_step.py --smoke   # a tiny model without PyTorch, prints only
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import _results
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _steps import quartiles, replacing, step_of, time_alternately
from _transformer import Config, init, make_loss

import optax_ext
import sharding as shd
from optax_ext import Factoring

LEARNING_RATE = 1e-4
GPT2 = Config(layers=12, width=768, heads=12, vocabulary=50257, scan=False)
TINY = Config(layers=2, width=64, heads=4, vocabulary=256, scan=False)
# Heads and head_dim are one side of an attention matrix.
FACTORING = optax_ext.by_path({"qkv": Factoring((0,), (1, 2, 3)), "out": Factoring((0, 1), (2,))})
OPTIMIZERS = {
    "AdamW": lambda: optax.adamw(LEARNING_RATE),
    "CAME": lambda: optax_ext.came(LEARNING_RATE, factoring=FACTORING),
}
BASE = "optax alone, AdamW"


@dataclasses.dataclass
class Contender:
    """One way to train the model.

    Attributes:
      step: takes one training step and waits for it.
      update: takes the optimizer's part of one alone.
    """

    step: Callable[[], None]
    update: Callable[[], None]


Group = dict[str, Callable[[], Contender]]


def of_optax(tx: optax.GradientTransformation, config: Config, tokens: np.ndarray) -> Contender:
    """Plain JAX and optax on one device, parameters and state donated."""
    held = [init(config)]
    held.append(jax.jit(tx.init)(held[0]))
    loss_fn, update = make_loss(), step_of(tx)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        return *update(params, state, grads), loss

    grads = jax.jit(jax.grad(loss_fn))(held[0], tokens)
    return Contender(
        replacing(jax.jit(step, donate_argnums=(0, 1)), held, jnp.asarray(tokens)),
        replacing(jax.jit(update, donate_argnums=(0, 1)), held, grads),
    )


def of_zero(tx: optax.GradientTransformation, config: Config, tokens: np.ndarray) -> Contender:
    """ZeRO stage 2 on all devices."""
    zero = shd.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=2)

    def make_state() -> tuple:
        params = init(config)
        return params, tx.init(params)

    held = [zero.init(make_state, tx=tx)]
    batch = zero.put(tokens)
    _, grads = jax.jit(zero.value_and_grad(make_loss()))(held[0][0], batch)

    def update(state: Any, grads: Any) -> tuple:
        return (zero.apply_gradients(state, grads, tx=tx),)

    return Contender(
        replacing(zero.train_step(make_loss(), tx=tx), held, batch),
        replacing(jax.jit(update, donate_argnums=0), held, grads),
    )


def of_torch(make: Callable[[list], Any], config: Config, tokens: np.ndarray) -> Contender:
    """The same model in PyTorch."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    width, heads = config.width, config.heads

    class Block(nn.Module):
        """Causal attention, then an MLP."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2))
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, heads, width // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Model(nn.Module):
        """The mean cross entropy of the next token; the embedding is tied."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(config.vocabulary, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(config.layers)))
            self.norm = nn.RMSNorm(width, eps=1e-6)
            for param in self.parameters():
                if param.ndim > 1:
                    nn.init.normal_(param, std=0.02)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.blocks(self.embed(tokens[:, :-1])))
            logits = F.linear(x, self.embed.weight)
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    batch = torch.from_numpy(tokens).long().to(device)

    model = Model().to(device)
    if sum(p.numel() for p in model.parameters()) != config.num_params:
        raise AssertionError("the model in PyTorch is another than that in JAX.")
    optimizer = make(list(model.parameters()))

    def update() -> None:
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    def step() -> None:
        optimizer.zero_grad()
        model(batch).backward()
        update()

    return Contender(step, update)


def groups(config: Config, tokens: np.ndarray, torch_too: bool) -> list[Group]:
    """Groups that are timed alternately; the first of each is the reference of the others."""
    alone = {
        f"optax alone, {name}": functools.partial(of_optax, make(), config, tokens)
        for name, make in OPTIMIZERS.items()
    }
    if torch_too:
        import torch

        made = {"AdamW fused": lambda p: torch.optim.AdamW(p, LEARNING_RATE, fused=True)}
        if importlib.util.find_spec("came_pytorch"):
            from came_pytorch import CAME

            made["came-pytorch"] = lambda p: CAME(p, lr=LEARNING_RATE)
        alone |= {
            f"PyTorch, {name}": functools.partial(of_torch, make, config, tokens)
            for name, make in made.items()
        }
    zero = {BASE: alone[BASE]} | {
        f"ZeRO 2, {name}": functools.partial(of_zero, make(), config, tokens)
        for name, make in OPTIMIZERS.items()
    }
    return [alone, zero]


def measure(group: Group, rounds: int, num_tokens: int) -> Iterator[str]:
    """A row for each contender."""
    contenders = {name: make() for name, make in group.items()}
    # Full steps first: PyTorch's update needs the gradients of one.
    steps = time_alternately(
        {name: one.step for name, one in contenders.items()}, rounds, warm_up=1
    )
    updates = time_alternately({name: one.update for name, one in contenders.items()}, rounds)
    for name in contenders:
        step, update = np.median(steps[name]), np.median(updates[name])
        yield (
            f"| {name} | {num_tokens / step:.0f} | {quartiles(steps[BASE] / steps[name])} "
            f"| {step:.2f} | {update:.3f} | {update / step:.1%} |"
        )


def main() -> None:
    """Measures; writes the table of full size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small, without PyTorch; no file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--platform", default="cpu", help="cpu or gpu")
    options = parser.parse_args()
    jax.config.update("jax_platforms", {"gpu": "cuda"}.get(options.platform, options.platform))
    jax.config.update("jax_num_cpu_devices", 8)
    config = TINY if options.smoke else GPT2
    on_gpu = options.platform == "gpu"
    length = 16 if options.smoke else 1024 if on_gpu else 64
    num_tokens = 8 * length
    tokens = np.random.default_rng(0).integers(
        config.vocabulary, size=(8, length + 1), dtype=np.int32
    )
    torch_too = not options.smoke and bool(importlib.util.find_spec("torch"))
    rounds = 1 if options.smoke else options.rounds
    rows = (measure(g, rounds, num_tokens) for g in groups(config, tokens, torch_too))
    table = _results.table(
        "| step | tokens a second | / optax alone with AdamW, median (quartiles) | s, median "
        "| of them the update, s | share |\n|---|---|---|---|---|---|",
        itertools.chain.from_iterable(rows),
    )
    if options.smoke:
        return
    devices, kind = jax.device_count(), jax.devices()[0].device_kind
    where = f"{len(os.sched_getaffinity(0))} CPU cores" if not on_gpu else kind
    _results.write(
        f"training_step_{options.platform}",
        "A training step of GPT-2 small",
        f"{config.num_params / 1e6:.1f}M float32 parameters on {where}, {num_tokens} tokens a "
        f"step, {options.rounds} rounds. ZeRO on {devices} {'virtual ' * (not on_gpu)}devices; "
        "optax alone and PyTorch on one, with all cores.",
        table,
        script="training_step",
    )


if __name__ == "__main__":
    main()
