"""Records the authors' CAME (came-pytorch 0.1.3) in ``came.npz``.

pip install -e '.[parity]'
python -m tests.optax_ext.golden.make_came
"""

import pathlib

import numpy as np

from ..traces import SHAPES, Recorder, gradients, parameters

NUM_STEPS = 500
# Fields of the library's state, and what the authors call them.
NAMES = {
    "mu": "exp_avg",
    "nu": "exp_avg_sq",
    "nu_row": "exp_avg_sq_row",
    "nu_col": "exp_avg_sq_col",
    "instability_row": "exp_avg_res_row",
    "instability_col": "exp_avg_res_col",
}


def trace(shape, num_steps, *, lr, weight_decay, from_zero=False):
    """Yields (step, {field: array}) of one parameter under the authors' code, in float64.

    ``from_zero`` sets the parameter to zero before every step; what is then in it is the update.
    """
    import came_pytorch
    import torch

    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    if not from_zero:
        p.data.copy_(torch.as_tensor(parameters(shape)))
    optimizer = came_pytorch.CAME([p], lr=lr, weight_decay=weight_decay)
    for i, g in enumerate(gradients(shape, num_steps)):
        if from_zero:
            p.data.zero_()
        p.grad = torch.as_tensor(g)
        optimizer.step()
        state = optimizer.state[p]
        fields = {ours: state[theirs].numpy() for ours, theirs in NAMES.items() if theirs in state}
        yield i + 1, fields | {"update" if from_zero else "params": p.detach().numpy()}


def main():
    plain, decay = Recorder("plain"), Recorder("decay")
    for leaf, shape in SHAPES.items():
        for step, fields in trace(shape, NUM_STEPS, lr=1.0, weight_decay=0.0, from_zero=True):
            for field, x in fields.items():
                plain.add(leaf, field, step, x)
        # The state does not depend on the parameters: once is enough.
        for step, fields in trace(shape, NUM_STEPS, lr=1e-2, weight_decay=1e-2):
            decay.add(leaf, "params", step, fields["params"])
    path = pathlib.Path(__file__).with_name("came.npz")
    np.savez_compressed(path, **plain.arrays(), **decay.arrays())
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
