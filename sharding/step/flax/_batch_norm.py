"""``BatchNorm`` of Flax over the batch of all devices, of unmodified models."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def over_devices(module: Any, axes: tuple[str, ...]) -> Iterator[None]:
    """A ``BatchNorm`` of linen over the axes of the batch, unless it names one that is there."""
    own = module.axis_name
    if is_bound(own):
        yield
        return
    # A module is frozen; its fields are put back when the call ends.
    object.__setattr__(module, "axis_name", axes)
    try:
        yield
    finally:
        object.__setattr__(module, "axis_name", own)


def set_axes(module: Any, axes: tuple[str, ...]) -> None:
    """Does so with a ``BatchNorm`` of nnx, whose model a step has merged for itself."""
    if not is_bound(module.axis_name):
        module.axis_name = axes


def is_bound(axis_name: Any) -> bool:
    """Whether there is such a mesh axis, or axis of ``vmap``, where this is called."""
    if axis_name is None:
        return False
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True
