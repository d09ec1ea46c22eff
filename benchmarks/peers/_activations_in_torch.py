"""Gradients of the networks of ``activations.py`` in PyTorch, under its activation memory budget.

Of ``_networks.py``'s ResNet-50 and GPT-2, operation by operation. It imports PyTorch alone.

  python _activations_in_torch.py NETWORK SCALE BUDGET ROUNDS    # prints JSON
"""

import json
import pathlib
import statistics
import sys
import time

import torch
import torch._functorch.config as functorch_config
from torch.nn import functional


class Params:
    """Parameters by the order in which a network asks for them."""

    def __init__(self):
        self.made, self.next = [], 0

    def __call__(self, *shape):
        if self.next == len(self.made):
            made = torch.ones(shape) if len(shape) == 1 else 0.03 * torch.randn(shape)
            self.made.append(made.requires_grad_())
        self.next += 1
        return self.made[self.next - 1]


def conv(p, x, width, size=3, stride=1, act=torch.relu):
    """With a batch norm of the batch."""
    x = functional.conv2d(x, p(width, x.shape[1], size, size), None, stride, size // 2)
    mean = x.mean((0, 2, 3), keepdim=True)
    var = ((x - mean) ** 2).mean((0, 2, 3), keepdim=True)
    scale, shift = (p(width)[None, :, None, None] for _ in range(2))
    return act((x - mean) * torch.rsqrt(var + 1e-5) * scale + shift)


def bottleneck(p, x, width, stride, first):
    def same(x):
        return x

    y = conv(p, conv(p, conv(p, x, width, 1), width, 3, stride), 4 * width, 1, act=same)
    return torch.relu(y + (conv(p, x, 4 * width, 1, stride, same) if first else x))


def resnet50(p, x, scale):
    width = 64 // scale
    x = functional.max_pool2d(conv(p, x, width, 7, 2), 2)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for i in range(blocks):
            x = bottleneck(p, x, width * 2**stage, 2 if stage and not i else 1, not i)
    logits = x.mean((2, 3)) @ p(x.shape[1], 1000)
    return -functional.log_softmax(logits, -1)[:, 0].mean()


def norm(p, x):
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5) * p(x.shape[-1])


def attend(p, x, heads=8):
    width = x.shape[-1]
    q, k, v = ((x @ p(width, width)).reshape(*x.shape[:2], heads, -1) for _ in range(3))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = torch.where(past, scores, -1e9)
    y = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)
    return y.reshape(x.shape) @ p(width, width)


def gpt2(p, tokens, scale):
    width = 768 // scale
    table = p(50304 // scale, width)
    x = table[tokens] + p(tokens.shape[1], width)
    for _ in range(12):
        x = x + attend(p, norm(p, x))
        y = norm(p, x)
        hidden = functional.gelu(y @ p(width, 4 * width), approximate="tanh")
        x = x + hidden @ p(4 * width, width)
    logits = functional.log_softmax(norm(p, x) @ table.T, -1)
    return -logits.gather(-1, tokens[..., None]).mean()


def resident(name):
    """Bytes of this process: VmRSS now, or VmHWM, their most."""
    (line,) = [x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if name in x]
    return 1024 * int(line.split()[1])


def main():
    """Prints bytes between the passes, the peak of the process, and seconds."""
    name, scale, budget, rounds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    functorch_config.activation_memory_budget = budget
    fn = {"ResNet-50": resnet50, "GPT-2, unrolled": gpt2}[name]
    if fn is resnet50:
        batch = torch.randn(64 // scale, 3, 224 // scale, 224 // scale)
    else:
        batch = torch.randint(50304 // scale, (8 // scale, 1024 // scale))
    params = Params()
    fn(params, batch, scale)

    def loss(made, batch):
        given = Params()
        given.made = made
        return fn(given, batch, scale)

    compiled = torch.compile(loss, backend="aot_eager_decomp_partition", fullgraph=True)
    began = time.perf_counter()
    stored = {}

    def keep(x):
        stored[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        value = compiled(params.made, batch)
    own = {x.untyped_storage().data_ptr() for x in [*params.made, batch]}
    saved = sum(n for pointer, n in stored.items() if pointer not in own)
    value.backward()
    compiling = time.perf_counter() - began
    seconds, peaks = [], []
    for _ in range(int(rounds)):
        for x in params.made:
            x.grad.zero_()  # which stay, so that they are no part of a peak
        before = resident("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        began = time.perf_counter()
        compiled(params.made, batch).backward()
        seconds.append(time.perf_counter() - began)
        peaks.append(resident("VmHWM") - before)
    found = {"saved": saved, "peak": statistics.median(peaks), "compiling": compiling}
    found |= {"seconds": statistics.median(seconds)}
    print(json.dumps(found | {"loss": float(value.detach())}))


if __name__ == "__main__":
    main()
