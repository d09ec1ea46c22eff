"""A partition spec for every leaf of any transformation's state, without rules per optimizer."""

import warnings
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from sharding.placement._specs import AnyMesh, path_str, resolve_param_specs, trim


def state_specs(
    tx: optax.GradientTransformation, params: Any, param_specs: Any, mesh: AnyMesh
) -> Any:
    """A partition spec for every leaf of a transformation's state, without rules of its own.

    ``tx.init`` is traced on abstract parameters that carry their shardings on a mesh of Explicit
    axes. The types of the result hold the spec of each leaf: that of its parameter for a moment,
    that of the rows for a row statistic, replicated for a counter.

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
        have the shape and path of a parameter get its spec, and all others are replicated.

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
    """The types of the state, with shardings derived from those of the parameters."""
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
    # A mesh in the context cannot be replaced by one of another size; an empty one can.
    none = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with none, jax.sharding.use_abstract_mesh(explicit):
        return jax.eval_shape(tx.init, typed)


def _spec_of(x: jax.ShapeDtypeStruct) -> PartitionSpec:
    return trim([] if x.sharding is None else list(x.sharding.spec))


def _specs_by_path(
    tx: optax.GradientTransformation, params: Any, specs: Any, mesh: AnyMesh, error: Exception
) -> Any:
    """Specs where ``tx.init`` fails on the shardings of some parameters, or of all.

    Their state gets the spec of the parameter of the same path and shape, else it is replicated.
    """
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = jax.eval_shape(tx.init, plain)  # raises the transformation's own error, if it has one
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    treedef: Any = jax.tree.structure(plain)
    flat_specs = treedef.flatten_up_to(specs)

    def init(sharded: set[int]) -> Any:
        """Types of the state if only these parameters are sharded; None if ``tx.init`` fails."""
        some = [spec if i in sharded else PartitionSpec() for i, spec in enumerate(flat_specs)]
        try:
            return _typed_init(tx, params, treedef.unflatten(some), mesh)
        except Exception:
            return None

    works = {i for i in range(len(leaves)) if init({i}) is not None}
    typed = init(works)
    if typed is None:
        works, typed = set(), state
    left = {
        (path, tuple(leaf.shape)): spec
        for i, ((path, leaf), spec) in enumerate(zip(leaves, flat_specs, strict=True))
        if i not in works
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
