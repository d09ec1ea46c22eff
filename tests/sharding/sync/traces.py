"""Input gradients of the references of gradient sync."""

import numpy as np

DEVICES, STEPS, START, RANK = 4, 40, 3, 2
SHAPES = {"w": (12, 20), "v": (15, 8), "b": (20,)}


def gradients(step, device, shapes=SHAPES):
    """Full-rank gradients of a different scale on each device."""
    rng = np.random.default_rng(1000 * step + device)
    return {k: rng.normal(size=s) * 10 ** (device / 3) for k, s in shapes.items()}
