"""A gradient sync per parameter, chosen by path."""

import re
from collections.abc import Mapping
from typing import Any

from sharding._types import Array, Tree
from sharding.placement._specs import Axis, check_patterns, first_names, plain_path
from sharding.sync._dense import dense
from sharding.sync._interface import GradientSync, RowMethod, is_none, named_leaves, with_all_reduce


def by_path(
    rules: Mapping[str, GradientSync], *, default: GradientSync | None = None
) -> GradientSync:
    """Synchronizes each gradient by the first pattern that is found in its path.

    Args:
      rules: regular expression -> gradient sync. Paths are keys joined by ``/``, such as
        ``block_0/mlp/kernel``; a pattern may match anywhere in them.
      default: for paths in which no pattern is found; None for ``dense()``.

    Raises:
      ValueError: if a pattern is not a regular expression, or a rule not a ``GradientSync``; in
        ``init``: if a pattern is the first match of no path.

    Example:
      >>> from sharding import sync
      >>> grad_sync = sync.by_path({"embedding": sync.top_k(0.01), "kernel": sync.powersgd(4)})
    """
    check_patterns("by_path", rules)
    for pattern, rule in rules.items():
        if not isinstance(rule, GradientSync):
            raise ValueError(
                f"by_path: the rule of pattern {pattern!r} must be a GradientSync, such as "
                f"sync.dense(), got {rule!r}."
            )
    syncs = [*rules.values(), default or dense()]

    def sync_of(path: str) -> int:
        """The index in ``syncs``."""
        matches = (i for i, pattern in enumerate(rules) if re.search(pattern, plain_path(path)))
        return next(matches, len(rules))

    def split(flat: list[tuple[str, Any]]) -> list[dict[str, Any]]:
        """The leaves of each sync, by path."""
        groups: list[dict[str, Any]] = [{} for _ in syncs]
        for path, x in flat:
            groups[sync_of(path)][path] = x
        return groups

    def init(params: Tree) -> Any:
        flat, _ = named_leaves(params)
        groups = split(flat)
        for pattern, group in zip(rules, groups[:-1], strict=True):
            if not group:
                raise ValueError(
                    f"by_path: pattern {pattern!r} is the first match of no path. Remove it, "
                    "correct it, or move it before the others; the paths are "
                    f"{first_names(repr(path) for path, _ in flat)}."
                )
        return tuple(sync.init(group) for sync, group in zip(syncs, groups, strict=True))

    def reduce_scatter(grads: Tree, state: Tree, axis: Axis, dims: Any) -> tuple[Any, Any]:
        flat, treedef = named_leaves(grads, is_leaf=is_none)
        flat_dims = dict(zip((p for p, _ in flat), treedef.flatten_up_to(dims), strict=True))
        out: dict[str, Any] = {}
        new_states = []
        for sync, group, old in zip(syncs, split(flat), state, strict=True):
            group_dims = {path: flat_dims[path] for path in group}
            reduced, new = sync.reduce_scatter(group, old, axis, group_dims)
            out |= reduced
            new_states.append(new)
        return treedef.unflatten([out[path] for path, _ in flat]), tuple(new_states)

    def rows(path: str, x: Array) -> RowMethod | None:
        rows_of = syncs[sync_of(path)].rows
        return rows_of(path, x) if rows_of else None

    return with_all_reduce(init, reduce_scatter, rows)
