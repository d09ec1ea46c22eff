"""The three tasks: next token, masked tokens, corrupted spans.

Batches are functions of (seed, step) and their size alone, so that every optimizer sees the same.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable

import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
from _corpus import Corpus

# Behind the 256 bytes. The vocabulary is a multiple of 64.
MASK, END, START = 256, 257, 258
FIRST_SENTINEL, VOCABULARY = 259, 320
NOISE, MEAN_SPAN = 0.15, 3.0
VALIDATION_SEED = 20_000

Batch = dict[str, np.ndarray]
Corrupt = Callable[[np.ndarray, np.random.Generator], Batch]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a model learns.

    Attributes:
      corrupt: makes a batch of windows of length + 1 bytes.
      causal: whether the stack that reads ``inputs`` looks back only.
      encoder_decoder: whether there is a second stack, which reads ``source``.
    """

    corrupt: Corrupt
    causal: bool
    encoder_decoder: bool = False

    def batch(self, corpus: Corpus, seed: int, step: int, size: int) -> Batch:
        """A batch to train on."""
        return self.corrupt(corpus.batch(seed, step, size), np.random.default_rng((seed, step, 1)))

    def validation(self, corpus: Corpus, size: int) -> Batch:
        """Held-out windows with fixed masks; always the same."""
        return self.corrupt(corpus.validation(size), np.random.default_rng(VALIDATION_SEED))


def next_token(windows: np.ndarray, rng: np.random.Generator) -> Batch:
    """GPT's task: each position's target is the byte after it."""
    del rng
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def masked(windows: np.ndarray, rng: np.random.Generator) -> Batch:
    """BERT's task: 15 % are targets; of these 80 % are hidden, 10 % random, 10 % as they are."""
    targets = windows[:, :-1]
    number = round(NOISE * targets.shape[1])
    order = rng.random(targets.shape).argsort(axis=1)
    chosen = order.argsort(axis=1) < number
    kind = rng.random(targets.shape)
    inputs = np.where(chosen & (kind < 0.8), MASK, targets)
    random = rng.integers(256, size=targets.shape)
    inputs = np.where(chosen & (kind >= 0.9), random, inputs)
    return {
        "inputs": inputs.astype(np.int32),
        "targets": targets,
        "weights": chosen.astype(np.float32),
    }


def span_corruption(windows: np.ndarray, rng: np.random.Generator) -> Batch:
    """T5's task: spans of 3 tokens on average, 15 % together, give way to a sentinel each.

    The encoder reads what is left; the decoder writes each sentinel and the span behind it.
    """
    tokens = windows[:, :-1]
    size, length = tokens.shape
    noise = round(NOISE * length)
    spans = round(noise / MEAN_SPAN)
    kept = _composition(rng, size, length - noise, spans)
    hidden = _composition(rng, size, noise, spans)
    # Text and noise in turn, text first.
    ends = np.cumsum(np.stack([kept, hidden], axis=2).reshape(size, -1), axis=1)
    part = (np.arange(length)[None, :, None] >= ends[:, None, :]).sum(axis=2)
    is_noise, span = part % 2 == 1, part // 2
    starts = is_noise & (np.diff(part, axis=1, prepend=0) == 1)
    sentinels = FIRST_SENTINEL + span

    source = np.where(starts, sentinels, tokens)[~is_noise | starts].reshape(size, -1)
    # Two places for each token, one for a sentinel before it.
    pairs = np.stack([sentinels, tokens], axis=2)
    targets = pairs[np.stack([starts, is_noise], axis=2)].reshape(size, -1)
    column = np.ones((size, 1), np.int64)
    targets = np.concatenate([targets, END * column], axis=1)
    return {
        "source": np.concatenate([source, END * column], axis=1).astype(np.int32),
        "inputs": np.concatenate([START * column, targets[:, :-1]], axis=1).astype(np.int32),
        "targets": targets.astype(np.int32),
    }


def _composition(rng: np.random.Generator, size: int, total: int, parts: int) -> np.ndarray:
    """Random ways to write ``total`` as a sum of ``parts`` numbers above 0, (size, parts)."""
    cuts = rng.random((size, total - 1)).argsort(axis=1)[:, : parts - 1] + 1
    edges = np.pad(np.sort(cuts, axis=1), ((0, 0), (1, 1)), constant_values=((0, 0), (0, total)))
    edges[:, 0] = 0
    return np.diff(edges, axis=1)


TASKS = {
    "next_token": Task(next_token, causal=True),
    "masked": Task(masked, causal=False),
    "span_corruption": Task(span_corruption, causal=True, encoder_decoder=True),
}
