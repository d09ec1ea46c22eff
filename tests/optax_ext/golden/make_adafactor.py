"""Records the Adafactor of Hugging Face transformers and of PyTorch in ``adafactor.npz``.

pip install -e '.[parity]'
python -m tests.optax_ext.golden.make_adafactor
"""

import pathlib

import numpy as np

from ..traces import SHAPES, Recorder, gradients, parameters

NUM_STEPS = 200
# Fields of the library's state, and what Hugging Face and PyTorch call them.
NAMES = {
    "mu": "exp_avg",
    "nu": ("exp_avg_sq", "variance"),
    "nu_row": ("exp_avg_sq_row", "row_var"),
    "nu_col": ("exp_avg_sq_col", "col_var"),
}
# The settings that one option of each stands for; see the test for the library's.
TRACES = {
    "hf": {"lr": 1.0},
    "hf momentum and decay": {"lr": 1e-2, "beta1": 0.9, "weight_decay": 1e-2},
    "hf parameter scale": {"lr": 1e-2, "scale_parameter": True},
    "torch": {"lr": 1e-2, "weight_decay": 1e-2},
}


def make(name, p):
    if name == "torch":
        import torch

        return torch.optim.Adafactor([p], **TRACES[name])
    from transformers.optimization import Adafactor

    return Adafactor([p], **{"scale_parameter": False, "relative_step": False} | TRACES[name])


def trace(name, shape, num_steps):
    """Yields (step, {field: array}) of one parameter, in float64.

    In the trace ``hf`` the parameter is zero before every step; what is then in it is the update.
    """
    import torch

    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    from_zero = name == "hf"
    if not from_zero:
        p.data.copy_(torch.as_tensor(parameters(shape)))
    optimizer = make(name, p)
    for i, g in enumerate(gradients(shape, num_steps)):
        if from_zero:
            p.data.zero_()
        p.grad = torch.as_tensor(g)
        optimizer.step()
        state = optimizer.state[p]
        fields = {"update" if from_zero else "params": p.detach().numpy()}
        for ours, theirs in NAMES.items():
            for key in (theirs,) if isinstance(theirs, str) else theirs:
                if state.get(key) is not None:
                    fields[ours] = state[key].numpy()
        if name == "torch" and len(shape) > 1:  # which keeps the dim that it averaged over
            fields["nu_row"], fields["nu_col"] = (
                fields["nu_row"][..., 0],
                fields["nu_col"][..., 0, :],
            )
        yield i + 1, fields


def main():
    arrays = {}
    for name in TRACES:
        recorder = Recorder(name)
        for leaf, shape in SHAPES.items():
            for step, fields in trace(name, shape, NUM_STEPS):
                # The second moment is that of the first trace.
                for field in fields if name == "hf" else fields.keys() & {"mu", "params"}:
                    recorder.add(leaf, field, step, fields[field])
        arrays |= recorder.arrays()
    path = pathlib.Path(__file__).with_name("adafactor.npz")
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
