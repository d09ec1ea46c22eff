"""Partition specs: of parameters, of what ZeRO shards, and of any transformation's state."""

import math
import sys
import warnings
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AnyMesh = Mesh | AbstractMesh
Axis = str | tuple[str, ...]


def is_spec(x: Any) -> bool:
    """Whether a tree's node is a spec."""
    return isinstance(x, PartitionSpec)


def _is_box(x: Any) -> bool:
    """Whether a node carries Flax's partition metadata; Flax itself is not needed here."""
    nnx = sys.modules.get("flax.nnx")
    return hasattr(x, "get_partition_spec") or (nnx is not None and isinstance(x, nnx.Variable))


def _spec_in(path: str, box: Any, mesh: AnyMesh) -> PartitionSpec:
    """The spec in a box, whose logical names the rules in the context turn into mesh axes."""
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(box, linen.LogicallyPartitioned):
        return _spec_by_rules(linen, path, box, mesh)
    if hasattr(box, "get_partition_spec"):  # of linen
        return box.get_partition_spec()
    return sys.modules["flax.nnx"].get_partition_spec(box).get_value() or PartitionSpec()


def _spec_by_rules(linen: Any, path: str, box: Any, mesh: AnyMesh) -> PartitionSpec:
    """As Flax does it: a name without a rule, or with one that says None, is replicated.

    Raises:
      ValueError: if a rule names an axis that the mesh does not have; without rules, if the names
        are no axes of the mesh themselves.
    """
    names = box.get_partition_spec()
    rules = [(name, axes) for name, axes in (*(box.rules or ()), *linen.get_logical_axis_rules())]
    if not rules:
        missing = [axis for entry in names for axis in axes_of(entry)]
        missing = [axis for axis in missing if axis not in mesh.axis_names]
        if missing:
            raise ValueError(
                f"parameter {path!r} has the logical axes {tuple(names)}, of which {missing[0]!r} "
                f"is not in the mesh {mesh.axis_names}, and no rules are in the context. Call this "
                "within flax.linen.logical_axis_rules(rules), or pass param_specs."
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


def path_str(path: Any) -> str:
    """A key path as ``params/dense/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a spec names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def entry_of(axes: tuple[str, ...]) -> Any:
    """The entry of a spec that names these axes."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def num_shards(mesh: AnyMesh, spec: PartitionSpec) -> int:
    """Into how many different parts a spec cuts an array."""
    return math.prod(mesh.shape[axis] for entry in spec for axis in axes_of(entry))


def sharding_on(leaf: Any, mesh: AnyMesh) -> NamedSharding | None:
    """How a real or abstract array lies on the mesh; None where that is not known."""
    if isinstance(leaf, jax.core.Tracer):
        return None
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or dict(sharding.mesh.shape) != dict(mesh.shape):
        return None
    return sharding


def resolve_param_specs(params: Any, param_specs: Any, mesh: AnyMesh) -> Any:
    """A spec for every parameter: the argument, else Flax metadata, else replicated.

    Args:
      params: arrays or ``ShapeDtypeStruct``; may hold Flax's partition boxes.
      param_specs: a tree of specs, of which a whole part of ``params`` may share one (a prefix);
        None to take the metadata.
      mesh: the mesh whose axes the specs name.

    Raises:
      ValueError: if the trees do not match, or a spec does not fit its parameter or the mesh.
    """
    if param_specs is None:

        def given(path: Any, x: Any) -> Any:
            if not _is_box(x):
                return PartitionSpec()
            spec = _spec_in(path_str(path), x, mesh)
            return jax.tree.map(lambda _: spec, x)

        specs = jax.tree_util.tree_map_with_path(given, params, is_leaf=_is_box)
    else:
        try:
            specs = jax.tree.map(
                lambda spec, part: jax.tree.map(lambda _: spec or PartitionSpec(), part),
                param_specs,
                params,
                is_leaf=lambda x: x is None or is_spec(x),
            )
        except ValueError as error:
            raise ValueError(f"param_specs does not match the parameters: {error}") from None

    def check(path: Any, leaf: Any, spec: PartitionSpec) -> None:
        _check_spec(path_str(path), tuple(leaf.shape), spec, mesh)

    jax.tree_util.tree_map_with_path(check, params, specs)
    return specs


def _check_spec(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"{spec} for {path!r} has more entries than its shape {shape}.")
    named = [axis for entry in spec for axis in axes_of(entry)]
    for dim, entry in enumerate(spec):
        for axis in axes_of(entry):
            if named.count(axis) > 1:
                raise ValueError(f"{spec} for {path!r} names axis {axis!r} twice.")
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"{spec} for {path!r}: axis {axis!r} is not in the mesh {mesh.axis_names}."
                )
        size = num_shards(mesh, PartitionSpec(entry))
        if shape[dim] % size:
            raise ValueError(
                f"{spec} for {path!r}: dim {dim} of shape {shape} does not divide by {size}."
            )


def with_axis(spec: PartitionSpec, ndim: int, dim: int, axis: Axis) -> PartitionSpec:
    """A spec that cuts a free dim over ``axis``, too."""
    entries = list(spec) + [None] * (ndim - len(spec))
    entries[dim] = axis
    return trim(entries)


def trim(entries: list[Any]) -> PartitionSpec:
    """A spec without the dims at the end that nothing cuts."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)


def state_specs(
    tx: optax.GradientTransformation, params: Any, param_specs: Any, mesh: AnyMesh
) -> Any:
    """A partition spec for every leaf of a transformation's state, without rules of its own.

    ``tx.init`` is traced on abstract parameters that carry their shardings on a mesh of Explicit
    axes; the types of the result tell how each leaf lies: a moment lies as its parameter does, a
    row statistic as the rows, a counter is replicated.

    Args:
      tx: any optax transformation.
      params: the parameters, or ``ShapeDtypeStruct`` in their place.
      param_specs: a tree of specs as ``params`` (a prefix will do), or None for Flax metadata, or
        replicated.
      mesh: the mesh whose axes the specs name; of any axis types, or abstract.

    Returns:
      A tree as ``tx.init(params)`` with a ``PartitionSpec`` for every array; good as the
      ``out_shardings`` of ``tx.init`` and of the update on any mesh of these axes.

    Raises:
      ValueError: if a spec does not fit its parameter or the mesh.

    Warns:
      UserWarning: if ``tx.init`` cannot be traced with shardings in its types; then leaves that
        have the shape and path of a parameter lie as it does, and all others are replicated.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sharding as shd
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> mesh = AbstractMesh((4, 2), ("data", "model"))
      >>> params = {"w": jax.ShapeDtypeStruct((256, 512), jnp.float32)}
      >>> specs = shd.state_specs(optax.adafactor(1e-3), params, {"w": P("data", "model")}, mesh)
      >>> specs[0].v_row["w"], specs[0].v_col["w"]
      (P('data',), P('model',))
    """
    specs = resolve_param_specs(params, param_specs, mesh)
    try:
        return jax.tree.map(_spec_of, _typed_init(tx, params, specs, mesh))
    except Exception as error:  # whatever the transformation's own code raises
        return _specs_by_path(tx, params, specs, mesh, error)


def _typed_init(tx: optax.GradientTransformation, params: Any, specs: Any, mesh: AnyMesh) -> Any:
    """The state's types, with the shardings that follow from those of the parameters."""
    explicit = AbstractMesh(
        tuple(mesh.shape.values()),
        mesh.axis_names,
        axis_types=(AxisType.Explicit,) * len(mesh.axis_names),
    )
    typed = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(explicit, spec)
        ),
        params,
        specs,
    )
    # Of a mesh in the context the next may not change the size.
    none = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with none, jax.sharding.use_abstract_mesh(explicit):
        return jax.eval_shape(tx.init, typed)


def _spec_of(x: jax.ShapeDtypeStruct) -> PartitionSpec:
    return trim([] if x.sharding is None else list(x.sharding.spec))


def _specs_by_path(
    tx: optax.GradientTransformation, params: Any, specs: Any, mesh: AnyMesh, error: Exception
) -> Any:
    """Specs where ``tx.init`` fails on some of the parameters as they lie, or on all of them.

    State of those lies as its parameter does if it has its path and shape, else it is replicated.
    """
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = jax.eval_shape(tx.init, plain)  # raises the transformation's own error, if it has one
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    treedef: Any = jax.tree.structure(plain)
    flat_specs = treedef.flatten_up_to(specs)

    def init(kept: set[int]) -> Any:
        """The state's types where all other parameters are whole; None if ``tx.init`` fails."""
        some = [spec if i in kept else PartitionSpec() for i, spec in enumerate(flat_specs)]
        try:
            return _typed_init(tx, params, treedef.unflatten(some), mesh)
        except Exception:
            return None

    kept = {i for i in range(len(leaves)) if init({i}) is not None}
    typed = init(kept)
    if typed is None:
        kept, typed = set(), state
    left = {
        (path, tuple(leaf.shape)): spec
        for i, ((path, leaf), spec) in enumerate(zip(leaves, flat_specs, strict=True))
        if i not in kept
    }
    warnings.warn(
        f"the transformation's init does not work on sharded types ({type(error).__name__}: "
        f"{error}); state of {', '.join(repr(path_str(path)) for path, _ in left)} is matched to "
        "parameters by path and shape, and replicated where that finds none.",
        stacklevel=3,
    )

    def match(path: Any, leaf: Any, like: Any) -> PartitionSpec:
        ends = range(len(path) + 1)
        parts = ((path[i:j], tuple(leaf.shape)) for i in ends for j in reversed(ends[i:]))
        return next((left[part] for part in parts if part in left), _spec_of(like))

    return jax.tree_util.tree_map_with_path(match, state, typed)
