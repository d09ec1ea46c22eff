"""A peer in PyTorch: one of the processes that torchrun starts, or a process of its own.

  torchrun --nproc-per-node 4 benchmarks/peers/_in_torch.py KIND FOLDER

Reads FOLDER/input.npz: the parameters and batches of ``training.py``; its first process writes
FOLDER/KIND.json. The environment needs PyTorch alone, DeepSpeed for kinds that say so.
"""

import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _measured import PASSED, lines_of, sent
from torch import nn
from torch.nn import functional as F

LEARNING_RATE, DECAY = 1e-3, 0.1


# --- The model: that of ``sharding.plan.Decoder`` -------------------------------------------------


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of (batch, length, heads, head)."""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = (torch.arange(x.shape[1], dtype=torch.float32)[:, None] * rate)[None, :, None]
    a, b = x.chunk(2, -1)
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, arrays: dict[str, np.ndarray], heads: int):
        super().__init__()
        self.heads = heads
        for name, array in arrays.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(array)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = norm(x, self.attention_norm)
        split = lambda z: z.unflatten(-1, (self.heads, -1))  # noqa: E731
        q = rotate(split(y @ self.query)).transpose(1, 2)
        k = rotate(split(y @ self.key)).transpose(1, 2)
        v = split(y @ self.value).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + y.flatten(-2) @ self.out
        y = norm(x, self.mlp_norm)
        return x + (F.silu(y @ self.gate) * (y @ self.up)) @ self.down


class Model(nn.Module):
    """Its call is the loss of a batch of (rows, length + 1) tokens."""

    def __init__(self, arrays: dict[str, np.ndarray], heads: int):
        super().__init__()
        prefix = "layers/"
        stacks = {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}
        count = len(next(iter(stacks.values())))
        self.blocks = nn.ModuleList(
            Block({k: x[i] for k, x in stacks.items()}, heads) for i in range(count)
        )
        for name in ("embed", "unembed", "norm"):
            self.register_parameter(name, nn.Parameter(torch.tensor(arrays[name])))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed[tokens[:, :-1]]
        for block in self.blocks:
            x = block(x)
        logits = norm(x, self.norm) @ self.unembed
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# --- The user's code, of which lines are counted --------------------------------------------------


def ddp(model: Model) -> Any:
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), LEARNING_RATE, weight_decay=DECAY)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = wrapped(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, optimizer


def ddp_zero_1(model: Model) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model)
    options = {"lr": LEARNING_RATE, "weight_decay": DECAY}
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **options)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = wrapped(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, optimizer.optim


def fsdp2(model: Model, keep_gathered: bool = False) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, reshard_after_forward=not keep_gathered)
    fully_shard(model, reshard_after_forward=not keep_gathered)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=DECAY)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, optimizer


def deepspeed(model: Model, stage: int) -> Any:
    import deepspeed

    options = {"lr": LEARNING_RATE, "weight_decay": DECAY, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 8 // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": options},
        "gradient_clipping": 0.0,  # 1.0 by default
        "zero_optimization": {"stage": stage, "overlap_comm": False},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return step, optimizer


def low_bits(model: Model, library: str, name: str) -> Any:
    """An optimizer with its state in few bits, in one process."""
    import importlib

    make = getattr(importlib.import_module(library), name)
    optimizer = make(model.parameters(), LEARNING_RATE, weight_decay=DECAY)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, optimizer


# What runs, and what its lines are counted of, by the name of a kind.
KINDS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ddp": (ddp, ()),
    "ddp_zero_1": (ddp_zero_1, ()),
    "fsdp2_zero_2": (fsdp2, (True,)),
    "fsdp2_zero_3": (fsdp2, ()),
    "deepspeed_1": (deepspeed, (1,)),
    "deepspeed_2": (deepspeed, (2,)),
    "deepspeed_3": (deepspeed, (3,)),
    "alone_torch": (low_bits, ("torch.optim", "AdamW")),
    "alone_bitsandbytes_8": (low_bits, ("bitsandbytes.optim", "AdamW8bit")),
    "alone_torchao_8": (low_bits, ("torchao.optim", "AdamW8bit")),
    "alone_torchao_fp8": (low_bits, ("torchao.optim", "AdamWFp8")),
    "alone_torchao_4": (low_bits, ("torchao.optim", "AdamW4bit")),
}


# --- What is measured -----------------------------------------------------------------------------


def held(tensors: Any) -> int:
    """Bytes of tensors in this process: of a sharded or coded one, what is stored."""
    total = 0
    for x in tensors:
        x = x.to_local() if hasattr(x, "to_local") else x
        parts = [getattr(x, name) for name in getattr(x, "tensor_attrs", ())] or [x]
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


def main(kind: str, folder: pathlib.Path) -> None:
    """Trains, and writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    arrays = dict(np.load(folder / "input.npz"))
    batches = torch.tensor(arrays.pop("batches").astype(np.int64))
    heads = int(arrays.pop("heads"))
    model = Model(arrays, heads)
    user_code, options = KINDS[kind]
    alone = kind.startswith("alone_")
    step, optimizer = user_code(model, *options)
    rows = batches.shape[1] // dist.get_world_size()
    mine = batches[:, rank * rows : (rank + 1) * rows]
    found: dict[str, Any] = {"losses": [], "seconds": [], "largest": 0.0}
    dist.barrier()
    for i, tokens in enumerate(mine):
        if i == PASSED:
            dist.barrier()
            before = sent()
        old = [p.detach().clone() for p in model.parameters()] if alone else []
        started = time.perf_counter()
        loss = step(tokens).detach()
        found["seconds"].append(time.perf_counter() - started)
        moved = [(p - x).abs().max().item() for p, x in zip(model.parameters(), old, strict=False)]
        found["largest"] = max([found["largest"], *moved])
        found["losses"].append(loss)
    dist.barrier()
    after = sent()
    losses = torch.stack(found["losses"])
    dist.all_reduce(losses)
    found["losses"] = (losses / dist.get_world_size()).tolist()
    found["sent"] = (after - before) / (len(mine) - PASSED) / dist.get_world_size()
    found["params"] = held(getattr(p, "ds_tensor", p) for p in model.parameters())
    while hasattr(optimizer, "optimizer"):  # DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    states = optimizer.state.values()
    found["state"] = held(x for s in states for x in s.values() if torch.is_tensor(x))
    # With the copies on which an optimizer steps, such as DeepSpeed's.
    own = {p.data_ptr() for p in model.parameters()}
    steps_on = [p for group in optimizer.param_groups for p in group["params"]]
    found["state"] += held(p for p in steps_on if p.data_ptr() not in own and p.numel())
    found["lines"] = lines_of(user_code)
    found["version"] = torch.__version__
    if rank == 0:
        (folder / f"{kind}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
