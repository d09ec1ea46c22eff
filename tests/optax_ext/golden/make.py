"""Records other implementations in float64: the authors' CAME (came-pytorch 0.1.3) in ``came.npz``,
the Adafactor of Hugging Face transformers and of PyTorch in ``adafactor.npz``.

pip install -e '.[parity]'
python -m tests.optax_ext.golden.make
"""

import pathlib

import numpy as np

from ..traces import SHAPES, WHOLE_STEPS, gradients, parameters, summary

# Fields of the library's state, and what CAME, Hugging Face and PyTorch call them.
NAMES = {
    "mu": ["exp_avg"],
    "nu": ["exp_avg_sq", "variance"],
    "nu_row": ["exp_avg_sq_row", "row_var"],
    "nu_col": ["exp_avg_sq_col", "col_var"],
    "instability_row": ["exp_avg_res_row"],
    "instability_col": ["exp_avg_res_col"],
}
# The settings that one option of each stands for; see the tests for the library's.
CAME = {"plain": {"lr": 1.0, "weight_decay": 0.0}, "decay": {"lr": 1e-2, "weight_decay": 1e-2}}
ADAFACTOR = {
    "hf": {"lr": 1.0},
    "hf momentum and decay": {"lr": 1e-2, "beta1": 0.9, "weight_decay": 1e-2},
    "hf parameter scale": {"lr": 1e-2, "scale_parameter": True},
    "torch": {"lr": 1e-2, "weight_decay": 1e-2},
}


def make(name, p):
    if name in CAME:
        import came_pytorch

        return came_pytorch.CAME([p], **CAME[name])
    if name == "torch":
        import torch

        return torch.optim.Adafactor([p], **ADAFACTOR[name])
    from transformers.optimization import Adafactor

    return Adafactor([p], **{"scale_parameter": False, "relative_step": False} | ADAFACTOR[name])


def trace(name, shape, num_steps):
    """Yields (step, {field: array}) of one parameter.

    In the traces ``plain`` and ``hf`` the parameter is zero before every step; what is then in it
    is the update.
    """
    import torch

    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    from_zero = name in ("plain", "hf")
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
            for key in theirs:
                if state.get(key) is not None:
                    fields[ours] = state[key].numpy()
        if name == "torch" and len(shape) > 1:  # which keeps the dim that it averaged over
            fields["nu_row"] = fields["nu_row"][..., 0]
            fields["nu_col"] = fields["nu_col"][..., 0, :]
        # The second moments are those of the first trace.
        kept = {"plain": fields, "hf": fields, "decay": {"params"}}.get(name, {"mu", "params"})
        yield i + 1, {k: x for k, x in fields.items() if k in kept}


def record(arrays, key, step, kept):
    """Adds the summary of an array at one step."""
    whole = kept.pop("whole", None)
    if whole is not None and step in WHOLE_STEPS:
        arrays[f"{key}/whole/{step}"] = whole.copy()
    for kind, number in kept.items():
        arrays.setdefault(f"{key}/{kind}", []).append(number)


def main():
    for file, names, num_steps in (("came", CAME, 500), ("adafactor", ADAFACTOR, 200)):
        arrays = {}
        for name in names:
            for leaf, shape in SHAPES.items():
                for step, fields in trace(name, shape, num_steps):
                    for field, x in fields.items():
                        record(arrays, f"{name}/{leaf}/{field}", step, summary(field, x))
        path = pathlib.Path(__file__).with_name(f"{file}.npz")
        np.savez_compressed(path, **arrays)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
