"""Names and presets of MaxText: what hand-written policies save, offload or compute again."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from sharding.plan.model._saved_names import PRESETS

MAXTEXT_NAMES = frozenset((*PRESETS["minimal_with_context"][0], "decoder_layer_input"))
_PLACES = ("device", "offload", "remat")

Names = Collection[str] | Mapping[str, str] | str | None


class NameRequest(NamedTuple):
    """What a caller allows or demands.

    Attributes:
      allowed: names that may be saved; None for all.
      saved: names that are saved on the device; None where the planner chooses.
      offloaded: names that are copied to host memory.
    """

    allowed: Collection[str] | None = None
    saved: tuple[str, ...] | None = None
    offloaded: tuple[str, ...] = ()


def request_of(names: Names) -> NameRequest:
    """Reads the argument ``names``: a preset, a place for each name, or names that are allowed.

    >>> request_of({"mlpwi": "offload", "context": "device", "mlpwo": "remat"})
    NameRequest(allowed=None, saved=('context',), offloaded=('mlpwi',))

    Raises:
      ValueError: for an unknown preset or place.
    """
    if isinstance(names, str):
        if names not in PRESETS:
            known = ", ".join(map(repr, PRESETS))
            raise ValueError(f"names={names!r} is no preset; known are {known}.")
        return NameRequest(None, *PRESETS[names])
    if isinstance(names, Mapping):
        for name, place in names.items():
            if place not in _PLACES:
                raise ValueError(
                    f"names: {name!r} must be in one of {', '.join(map(repr, _PLACES))}, got "
                    f"{place!r}."
                )
        saved, offloaded = (
            tuple(name for name, found in names.items() if found == place)
            for place in ("device", "offload")
        )
        return NameRequest(None, saved, offloaded)
    return NameRequest(names if names is None else frozenset(names))
