"""Records PyTorch's PowerSGD hook (torch 2.13) in ``powersgd.npz``.

The loss of four gloo processes is sum(parameters * g), so that their gradients are the given g. The
file holds what the hook replaces these by in each step, and its first random Q.

pip install -e '.[parity]'
python -m tests.sharding.sync.golden.make_powersgd
"""

import multiprocessing
import pathlib

import numpy as np

from ..traces import DEVICES, RANK, SHAPES, START, STEPS, gradients


def work(device, queue):
    """Runs one process; the first one puts its results into the queue."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    class Model(torch.nn.Module):
        """Parameters without a function."""

        def __init__(self):
            super().__init__()
            for name, shape in SHAPES.items():
                zeros = torch.zeros(shape, dtype=torch.float64)
                setattr(self, name, torch.nn.Parameter(zeros))

        def forward(self, grads):
            return sum((getattr(self, name) * grads[name]).sum() for name in SHAPES)

    drawn, draw = [], torch.randn

    def record(*args, **kwargs):
        drawn.append(draw(*args, **kwargs))
        return drawn[-1]

    torch.randn = record  # the hook draws its first Q with it
    dist.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:29577", rank=device, world_size=DEVICES
    )
    model = DistributedDataParallel(Model())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=RANK, start_powerSGD_iter=START, min_compression_rate=1.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(STEPS):
        model.zero_grad()
        grads = gradients(step, device)
        model({k: torch.from_numpy(g) for k, g in grads.items()}).backward()
        if device == 0:
            queue.put({f"{k}/{step}": getattr(model.module, k).grad.numpy().copy() for k in SHAPES})
    if device == 0:
        queue.put({f"q/{q.shape[1]}": q.numpy() for q in drawn})
    dist.barrier()
    dist.destroy_process_group()


def main():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=work, args=(i, queue)) for i in range(DEVICES)]
    for process in processes:
        process.start()
    found = {}
    for _ in range(STEPS + 1):
        found |= queue.get()
    for process in processes:
        process.join()
    path = pathlib.Path(__file__).with_name("powersgd.npz")
    np.savez_compressed(path, **found)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
