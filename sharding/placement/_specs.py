"""Partition specs of parameters: axes, entries, Flax metadata, checks."""

import functools
import math
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from optax_ext import FactoringRule
from sharding._types import Array, Tree

AnyMesh = Mesh | AbstractMesh
Axis = str | tuple[str, ...]
Axes = tuple[str, ...]
KeyPath = tuple[Any, ...]


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _is_box(x: Any) -> bool:
    """Whether a node carries Flax's partition metadata; Flax itself is not needed here."""
    nnx = sys.modules.get("flax.nnx")
    return hasattr(x, "get_partition_spec") or (nnx is not None and isinstance(x, nnx.Variable))


def _spec_in(mesh: AnyMesh, key_path: KeyPath, box: Any) -> PartitionSpec:
    """The spec in a box, whose logical names the rules in the context turn into mesh axes.

    As Flax does it, a name without a rule, or with one that says None, is replicated; so is an
    array without a box. Axes that the mesh lacks, such as those of a model's own mesh, shard
    nothing (``absent_axes``).
    """
    if not _is_box(box):
        return PartitionSpec()
    names = _names_in(box)
    if not _is_logical(box):
        return PartitionSpec(*entries_of(names, mesh.axis_names))
    linen: Any = sys.modules["flax.linen"]
    rules = [(name, axes) for name, axes in (*(box.rules or ()), *linen.get_logical_axis_rules())]
    path = path_str(key_path)
    if not rules:
        missing = [a for entry in names for a in axes_of(entry) if a not in mesh.axis_names]
        if missing:
            raise ValueError(
                f"parameter {path!r} has the logical axes {tuple(names)}, of which {missing[0]!r} "
                f"is not in the mesh {mesh.axis_names}, and no rules are in the context: call this "
                "in flax.linen.logical_axis_rules(rules), or pass param_specs (docs: how_to/linen)."
            )
        return names
    for name, axes in rules:
        axes = tuple(axes) if isinstance(axes, list) else axes
        for axis in axes_of(axes):
            if axis not in mesh.axis_names and name in box.names:
                raise ValueError(
                    f"parameter {path!r}: the rule {(name, axes)} of its logical axis {name!r} "
                    f"names the mesh axis {axis!r}, and the mesh has {mesh.axis_names}. Change "
                    "the rule, such as to None for replicated, or pass param_specs."
                )
    return linen.logical_to_mesh_axes(tuple(names), rules)


def _is_logical(box: Any) -> bool:
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(box, linen.LogicallyPartitioned)


def _names_in(box: Any) -> PartitionSpec:
    if hasattr(box, "get_partition_spec"):
        return box.get_partition_spec()
    return sys.modules["flax.nnx"].get_partition_spec(box).get_value() or PartitionSpec()


def absent_axes(mesh: AnyMesh, tree: Tree) -> list[str]:
    """The mesh axes in Flax metadata that the mesh lacks: they shard nothing."""
    boxes = filter(_is_box, jax.tree.leaves(tree, is_leaf=_is_box))
    specs = [_names_in(box) for box in boxes if not _is_logical(box)]
    names = dict.fromkeys(name for spec in specs for entry in spec for name in axes_of(entry))
    return [name for name in names if name not in mesh.axis_names]


def path_str(path: KeyPath) -> str:
    """A key path as ``params/dense/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def first_names(names: Iterable[str]) -> str:
    """The first of some names, for an error or a table."""
    names = list(names)
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def parameter_path(path: KeyPath) -> str:
    """The path that rules know: without the ``.value`` of a Flax box around the parameter."""
    boxed = len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value")
    return path_str(path[:-1] if boxed else path)


def rule_for_tree(rule: FactoringRule, tree: Tree) -> FactoringRule:
    """The factoring rule for these parameters: some rules choose by the shapes of all."""
    if not hasattr(rule, "for_tree"):
        return rule
    flat = jax.tree.leaves_with_path(tree)
    return rule.for_tree([(parameter_path(path), tuple(jnp.shape(x))) for path, x in flat])


def leaf_names(
    tree: Tree, like: Tree = None, is_leaf: Callable[[Any], bool] | None = None
) -> list[str]:
    r"""A name of its own for every leaf of a tree: its path as text.

    Where two paths are equal as text, such as those of ``{"x/y": a, "x": {"y": b}}``, every ``/``
    within a key is written ``\/``. For state, whose names contain those of parameters, the paths of
    the parameters (``like``) decide that.
    """
    paths, others = (
        [path for path, _ in jax.tree.leaves_with_path(t, is_leaf=is_leaf)]
        for t in (tree, tree if like is None else like)
    )
    if len(set(map(path_str, others))) == len(others):
        return list(map(path_str, paths))
    names = ["/".join(path_str((key,)).replace("/", r"\/") for key in path) for path in paths]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"two arrays have the path {twice[0]!r}; rename one of them.")
    return names


def plain_path(name: str) -> str:
    """The path as text, which patterns match, of a name of ``leaf_names``."""
    return name.replace(r"\/", "/")


def key_of_path(key: jax.Array, path: str) -> jax.Array:
    """A key for the array of this path, the same in every process."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


def check_patterns(name: str, patterns: Iterable[Any]) -> None:
    """Raises a ``ValueError`` that names the argument unless all are regular expressions."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{name}: pattern {pattern!r} is not a regular expression: {error}."
            ) from None


def axes_of(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def entry_of(axes: tuple[str, ...]) -> Any:
    return axes if len(axes) > 1 else axes[0] if axes else None


def num_shards(mesh: AnyMesh, spec: PartitionSpec) -> int:
    """The number of distinct shards of an array with this spec."""
    return math.prod(mesh.shape[axis] for entry in spec for axis in axes_of(entry))


def sharding_on(leaf: Array, mesh: AnyMesh) -> NamedSharding | None:
    """The sharding of a real or abstract array on the mesh; None if it is not known."""
    sharding: Any = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    named = isinstance(sharding, NamedSharding)
    return sharding if named and dict(sharding.mesh.shape) == dict(mesh.shape) else None


def resolve_param_specs(params: Tree, param_specs: Tree, mesh: AnyMesh) -> Tree:
    """A spec for every parameter: the argument, else Flax metadata, else replicated; checked."""
    if param_specs is None:
        given = functools.partial(_spec_in, mesh)
        param_specs = jax.tree.map_with_path(given, params, is_leaf=_is_box)
    specs = expand_specs(param_specs, params)
    jax.tree.map_with_path(functools.partial(_check_spec, mesh), params, specs)
    return specs


def expand_specs(param_specs: Tree, params: Tree) -> Tree:
    """A spec for every parameter, from a tree of specs or a prefix of one; None replicates."""
    specs = jax.tree.map(
        lambda spec: spec or PartitionSpec(), param_specs, is_leaf=lambda x: x is None or is_spec(x)
    )
    try:
        return jax.tree.broadcast(specs, params, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(f"param_specs does not match the parameters: {error}") from None


def _check_spec(mesh: AnyMesh, path: KeyPath, leaf: Array, spec: PartitionSpec) -> None:
    shape = tuple(leaf.shape)
    which = f"{spec} for {path_str(path)!r}"
    if len(spec) > len(shape):
        raise ValueError(f"{which} has more entries than its shape {shape}.")
    named = [axis for entry in spec for axis in axes_of(entry)]
    for dim, entry in enumerate(spec):
        for axis in axes_of(entry):
            if named.count(axis) > 1:
                raise ValueError(f"{which} names axis {axis!r} twice.")
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"{which}: axis {axis!r} is not in the mesh {mesh.axis_names}: name "
                    "axes of the mesh in param_specs, or PartitionSpec() for replicated."
                )
        size = num_shards(mesh, PartitionSpec(entry))
        if shape[dim] % size:
            raise ValueError(f"{which}: dim {dim} of shape {shape} does not divide by {size}.")


def only_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """A spec without the axes that are not among ``axes``."""
    return trim(entries_of(spec, axes))


def entries_of(spec: Iterable[Any], axes: Collection[str]) -> list[Any]:
    """The entries of a spec, without the axes that are not among ``axes``."""
    kept = (tuple(name for name in axes_of(entry) if name in axes) for entry in spec)
    return [entry_of(names) for names in kept]


def by_dim(spec: Iterable[Any], ndim: int) -> list[Any]:
    """One entry for each dim of an array."""
    entries = list(spec)
    return entries + [None] * (ndim - len(entries))


def of_last_dims(entries: Sequence[Any], ndim: int) -> PartitionSpec:
    """The spec, from one entry a dim, of an array whose leading dims loops took off, or split."""
    more = ndim - len(entries)
    return PartitionSpec(*[None] * more, *entries[max(-more, 0) :])


def explicit_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """The axes of a mesh whose shardings are part of the types of arrays."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


def with_axis(spec: PartitionSpec, ndim: int, dim: int, axis: Axis) -> PartitionSpec:
    """A spec that shards a free dim over ``axis``, too."""
    entries = by_dim(spec, ndim)
    entries[dim] = axis
    return trim(entries)


def trim(entries: list[Any]) -> PartitionSpec:
    """A spec without the unsharded dims at the end."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)
