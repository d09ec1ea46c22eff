"""CAME and Adafactor for one NumPy array in float64, in the words of the papers.

An independent second opinion. An array is copied into blocks [batch slice, stacked slice, row,
column]; row and column statistics are the papers' *sums*, and the second moment is the papers'
product ``r c^T / sum(r)``. Nothing here is shared with the library.
"""

import itertools
import math

import numpy as np


class _Blocks:
    """An array of ``shape`` as [batch, stack, n, m], and back."""

    def __init__(self, shape, rows=(), cols=(), batch=()):
        self.shape, self.rows, self.cols = shape, sorted(rows), sorted(cols)
        self.batch = sorted(batch)
        self.stack = [d for d in range(len(shape)) if d not in {*rows, *cols, *batch}]
        self.groups = [self.batch, self.stack, self.rows, self.cols]
        self.sizes = [math.prod(shape[d] for d in group) for group in self.groups]

    def split(self, x):
        return np.transpose(x, list(itertools.chain(*self.groups))).reshape(self.sizes).copy()

    def join(self, blocks, without=()):
        """Blocks (lacking the groups in ``without``) in the order of the array's own dims."""
        groups = [g for i, g in enumerate(self.groups) if i not in without]
        order = list(itertools.chain(*groups))
        full = blocks.reshape([self.shape[d] for d in order])
        return np.transpose(full, [order.index(d) for d in sorted(order)])


class _SecondMoment:
    """Row sums and column sums; an array that is not factored is a stack of 1 x 1 matrices."""

    def __init__(self, blocks):
        num_batch, num_stack, n, m = blocks.sizes
        self.blocks = blocks
        self.r = np.zeros((num_batch, num_stack, n))
        self.c = np.zeros((num_batch, num_stack, m))

    def update(self, square, decay):
        self.r = decay * self.r + (1 - decay) * square.sum(axis=3)
        self.c = decay * self.c + (1 - decay) * square.sum(axis=2)

    def estimate(self):
        return np.einsum("bsn,bsm,bs->bsnm", self.r, self.c, 1 / self.r.sum(axis=2))

    def slots(self):
        """(full, row, col) as the library keeps them: means, in the order of the dims."""
        _, _, n, m = self.blocks.sizes
        if not self.blocks.rows:
            return self.blocks.join(self.r[..., None]), None, None
        row = self.blocks.join(self.r / m, without=(3,))
        return None, row, self.blocks.join(self.c / n, without=(2,))


def _rms(blocks):
    """Of each batch slice."""
    return np.sqrt((blocks**2).mean(axis=(1, 2, 3), keepdims=True))


def _clip(u, threshold):
    """Each batch slice divided by max(1, RMS / threshold)."""
    return u if threshold is None else u / np.maximum(1.0, _rms(u) / threshold)


class Came:
    """CAME's state for one array; ``step(g)`` gives the direction, neither scaled nor negated."""

    def __init__(
        self,
        shape,
        *,
        b1=0.9,
        b2=0.999,
        b3=0.9999,
        eps=1e-30,
        eps_instability=1e-16,
        clip=1.0,
        debias=False,
        mu_dtype=np.float64,
        **dims,
    ):
        self.blocks = _Blocks(shape, **dims)
        self.betas, self.eps, self.eps_instability = (b1, b2, b3), eps, eps_instability
        self.clip, self.debias, self.mu_dtype = clip, debias, mu_dtype
        self.t = 0
        self.m = np.zeros(self.blocks.sizes)
        self.v = _SecondMoment(self.blocks)
        self.s = _SecondMoment(self.blocks)

    def step(self, g):
        b1, b2, b3 = self.betas
        self.t += 1
        g = self.blocks.split(np.asarray(g, np.float64))
        self.v.update(g**2 + self.eps, b2)
        u = _clip(g / np.sqrt(self.v.estimate()), self.clip)
        m = b1 * self.m + (1 - b1) * u
        self.m = m.astype(self.mu_dtype).astype(np.float64)
        if not self.blocks.rows:
            return self.blocks.join(m)
        self.s.update((u - m) ** 2 + self.eps_instability, b3)
        s = self.s.estimate()
        if self.debias:
            s = s / (1 - b3**self.t)
        return self.blocks.join(m / np.sqrt(s))

    def state(self):
        """The fields of the library's state, by name."""
        names = ("mu", "nu", "nu_row", "nu_col", "instability_row", "instability_col")
        slots = (self.blocks.join(self.m), *self.v.slots(), *self.s.slots()[1:])
        return dict(zip(names, slots, strict=True))


class Adafactor:
    """Adafactor's state for one array; ``step(g)`` gives the clipped direction."""

    def __init__(
        self, shape, *, decay_rate=0.8, offset=0, cap=None, b2=None, eps=1e-30, clip=1.0, **dims
    ):
        self.blocks = _Blocks(shape, **dims)
        self.decay_rate, self.offset, self.cap, self.b2 = decay_rate, offset, cap, b2
        self.eps, self.clip = eps, clip
        self.t = 0
        self.v = _SecondMoment(self.blocks)

    def step(self, g):
        self.t += 1
        g = self.blocks.split(np.asarray(g, np.float64))
        decay = 1 - max(1, self.t - self.offset) ** -self.decay_rate
        if self.cap is not None:
            decay = min(decay, self.cap)
        if self.b2 is not None:
            decay = self.b2
        self.v.update(g**2 + self.eps, decay)
        return self.blocks.join(_clip(g / np.sqrt(self.v.estimate()), self.clip))

    def parameter_scale(self, p, minimum=1e-3):
        """max(RMS, minimum) of each batch slice, in the parameter's shape."""
        p = self.blocks.split(np.asarray(p, np.float64))
        return self.blocks.join(np.broadcast_to(np.maximum(_rms(p), minimum), p.shape))

    def state(self):
        """The fields of the library's state, by name."""
        return dict(zip(("nu", "nu_row", "nu_col"), self.v.slots(), strict=True))
