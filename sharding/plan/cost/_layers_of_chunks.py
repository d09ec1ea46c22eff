"""How a pipeline's chunks share equal layers, so that a step in lockstep is as fast as possible."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """What a layer adds to a tick of a pipeline."""

    forward: float  # seconds of its forward pass
    backward: float  # of its backward pass; where that is split, of the gradient of the input
    weight: float = 0.0  # of the gradients of parameters, where backward passes are split


def layers_of_chunks(
    layers: int,
    chunks: int,
    layer: LayerSeconds,
    head: float,
    lockstep: Callable[..., float] | None = None,
) -> tuple[int, int]:
    """Layers of every chunk but the last one, at most, and of the last one, which has the head.

    Args:
      layers: of the model.
      chunks: of all devices.
      layer: seconds of a layer.
      head: seconds of the head, forward and backward.
      lockstep: ``lockstep_seconds`` of the schedule: chunks have the numbers with the least time.
        None: equal numbers as far as possible.

    >>> import functools
    >>> from sharding.plan import lockstep_seconds
    >>> layer = LayerSeconds(1.0, 2.0)
    >>> layers_of_chunks(80, 8, layer, head=9.0)
    (10, 10)
    >>> layers_of_chunks(80, 8, layer, 9.0, functools.partial(lockstep_seconds, "aligned", 8, 64))
    (11, 3)
    """
    if chunks == 1:
        return layers, layers
    if lockstep is None:
        most = math.ceil(layers / chunks)
        return most, of_last(layers, chunks, most)
    largest = layers - chunks + 1  # every chunk has a layer

    def time(most: int) -> tuple[float, int]:
        last = of_last(layers, chunks, most)
        return (
            lockstep(
                layer.forward * most,
                layer.backward * most,
                weight=layer.weight * most,
                last=(last * both + head, layer.weight * last),
            ),
            most,
        )

    # The last chunk runs both of its passes in one tick. Where that is as long for the others, or
    # near it, the time is least: it is convex in the number of their layers.
    both = layer.forward + layer.backward
    tick = max(layer.forward, layer.backward, layer.weight)
    level = round((layers * both + head) / (tick + (chunks - 1) * both))
    most = min(max(level, 1), largest)
    for step in (-1, 1):
        while 1 <= most + step <= largest and time(most + step) < time(most):
            most += step
    return most, of_last(layers, chunks, most)


def of_last(layers: int, chunks: int, most: int) -> int:
    """Layers of the last chunk where the others have at most so many; at least 1."""
    return max(1, layers - (chunks - 1) * most)


def all_chunks(layers: int, number: int, last: int) -> tuple[int, ...]:
    """Layers of each of ``number`` chunks, of which the last one has some.

    >>> all_chunks(32, 8, 3)
    (4, 4, 4, 4, 4, 4, 5, 3)
    """
    if number == 1:
        return (layers,)
    # Early stages have more micro-batches in flight, and the fewer layers.
    fewer, more = divmod(layers - last, number - 1)
    return (*[fewer] * (number - 1 - more), *[fewer + 1] * more, last)


def ranges_of(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """The first layer of each chunk and the one after its last, as ``layer_costs`` has them.

    >>> ranges_of((2, 2, 1))  # the embedding is the first of them, the head the last
    [(0, 3), (3, 5), (5, 7)]
    """
    bounds = [0]
    for i, number in enumerate(chunks):
        bounds.append(bounds[-1] + number + (i == 0) + (i == len(chunks) - 1))
    return list(itertools.pairwise(bounds))


def rows_of(layers: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Decoder layers of each chunk, whose ranges count the embedding and the head, too.

    >>> rows_of(12, [(0, 7), (7, 14)])
    [6, 6]
    """
    return [min(j, layers + 1) - max(i, 1) for i, j in ranges]
