"""A gradient sync per parameter, chosen by path."""

import re
from collections.abc import Mapping
from typing import Any

from sharding.placement._specs import Axis
from sharding.sync._dense import dense
from sharding.sync._interface import (
    GradientSync,
    RowMethod,
    is_none,
    named_leaves,
    with_all_reduce,
)


def by_path(
    rules: Mapping[str, GradientSync], *, default: GradientSync | None = None
) -> GradientSync:
    """Exchanges each array by the first pattern that is found in its path.

    Args:
      rules: regular expression -> exchange. Paths are keys joined by ``/``, such as
        ``block_0/mlp/kernel``; a pattern may match anywhere in them.
      default: for arrays in which no pattern is found; None for ``dense()``.

    Returns:
      A ``GradientSync``.

    Raises:
      ValueError: if a pattern is no regular expression, a rule no exchange; when used: if a
        pattern decides for no array.

    Example:
      >>> from sharding import sync
      >>> exchange = sync.by_path({"embedding": sync.top_k(0.01), "kernel": sync.powersgd(4)})
    """
    for pattern, rule in rules.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}.") from None
        if not isinstance(rule, GradientSync):
            raise ValueError(f"by_path: {pattern!r} must name a GradientSync, got {rule!r}.")
    parts = [*rules.values(), default or dense()]

    def part_of(path: str) -> int:
        found = (i for i, pattern in enumerate(rules) if re.search(pattern, path))
        return next(found, len(rules))

    def split(flat: list[tuple[str, Any]]) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = [{} for _ in parts]
        for path, x in flat:
            groups[part_of(path)][path] = x
        return groups

    def init(params: Any) -> tuple[Any, ...]:
        groups = split(named_leaves(params)[0])
        for pattern, group in zip(rules, groups, strict=False):
            if not group:
                raise ValueError(f"by_path: pattern {pattern!r} decides for no array.")
        return tuple(part.init(group) for part, group in zip(parts, groups, strict=True))

    def reduce_scatter(grads: Any, state: Any, axis: Axis, dims: Any) -> tuple[Any, Any]:
        flat, treedef = named_leaves(grads, is_leaf=is_none)
        flat_dims = dict(zip((p for p, _ in flat), treedef.flatten_up_to(dims), strict=True))
        out: dict[str, Any] = {}
        new = []
        for part, group, old in zip(parts, split(flat), state, strict=True):
            of_group = {path: flat_dims[path] for path in group}
            reduced, kept = part.reduce_scatter(group, old, axis, of_group)
            out |= reduced
            new.append(kept)
        return treedef.unflatten([out[path] for path, _ in flat]), tuple(new)

    def rows(path: str, x: Any) -> RowMethod | None:
        found = parts[part_of(path)].rows
        return found(path, x) if found else None

    return with_all_reduce(init, reduce_scatter, rows)
