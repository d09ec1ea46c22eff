"""A partition spec for every leaf of any transformation's state, without rules per optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from sharding._types import Array, Tree
from sharding._user_line import warn
from sharding.placement._specs import AnyMesh, is_spec, path_str, resolve_param_specs, trim


def state_shardings(
    init: optax.GradientTransformation | Callable[[Tree], Tree],
    params: Tree,
    param_specs: Tree = None,
    mesh: AnyMesh | None = None,
) -> Tree:
    """The shardings of any train state, for a ``jit`` of your own.

    Compiled without ``out_shardings``, a state is replicated on an Auto mesh whatever the
    parameters are. These follow from the parameters, as ``state_specs``, whose arguments it takes:
    ``init`` may return a state of any form, and None in place of ``param_specs`` or ``mesh`` stands
    for those of ``params``, if they are on a mesh.

    Returns:
      The state with a ``NamedSharding`` for every array.

    Raises:
      ValueError: without a mesh; if a spec does not fit its parameter or the mesh.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sharding as shd
      >>> zero = shd.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=3)
      >>> tx = optax.adamw(1e-3)
      >>> params = zero.place({"w": jnp.ones((64, 128))})
      >>> shardings = shd.state_shardings(tx, params)
      >>> opt_state = jax.jit(tx.init, out_shardings=shardings)(params)
      >>> opt_state[0].mu["w"].sharding == params["w"].sharding
      True
    """
    own = jax.tree.map(lambda x: getattr(x, "sharding", None), params)
    on_a_mesh = [s for s in jax.tree.leaves(own) if isinstance(s, NamedSharding)]
    if mesh is None:
        if not on_a_mesh:
            raise ValueError(
                "state_shardings got no mesh, and parameters that are on none. Pass mesh=, or "
                "place the parameters first, such as by zero.place."
            )
        mesh = on_a_mesh[0].mesh
    if param_specs is None and on_a_mesh:
        param_specs = jax.tree.map(lambda x: getattr(x, "spec", PartitionSpec()), own)
    specs = state_specs(init, params, param_specs, mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def state_specs(
    tx: optax.GradientTransformation | Callable[[Tree], Tree],
    params: Tree,
    param_specs: Tree,
    mesh: AnyMesh,
) -> Tree:
    """A partition spec for every leaf of a transformation's state, without rules of its own.

    ``tx.init`` is traced on abstract parameters that carry their shardings on a mesh of Explicit
    axes. The types of the result hold the spec of each leaf: that of its parameter for a moment,
    that of the rows for a row statistic, replicated for a counter.

    Args:
      tx: any optax transformation, or a function of the parameters.
      params: the parameters, or ``ShapeDtypeStruct`` in their place.
      param_specs: a tree of specs, or a prefix of one; None for Flax metadata, else replicated.
      mesh: the mesh whose axes the specs name; of any axis types, or abstract.

    Returns:
      A tree as ``tx.init(params)`` with a ``PartitionSpec`` for every array.

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
    init = getattr(tx, "init", tx)
    specs = resolve_param_specs(params, param_specs, mesh)
    try:
        return jax.tree.map(_spec_of, _typed_init(init, params, specs, mesh))
    except Exception as error:  # whatever the transformation's own code raises
        return _specs_by_path(init, params, specs, mesh, error)


def _typed_init(init: Callable[[Tree], Tree], params: Tree, specs: Tree, mesh: AnyMesh) -> Tree:
    """The types of the state, with shardings derived from those of the parameters."""
    types = (AxisType.Explicit,) * len(mesh.axis_names)
    explicit = AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=types)

    def typed(x: Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(explicit, spec))

    # A mesh in the context cannot be replaced by one of another size; an empty one can.
    none = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with none, jax.sharding.use_abstract_mesh(explicit):
        return jax.eval_shape(init, jax.tree.map(typed, params, specs))


def _spec_of(x: jax.ShapeDtypeStruct) -> PartitionSpec:
    return trim([] if x.sharding is None else list(x.sharding.spec))


def _specs_by_path(
    make: Callable[[Tree], Tree], params: Tree, specs: Tree, mesh: AnyMesh, error: Exception
) -> Tree:
    """Specs where ``tx.init`` fails on the shardings of some parameters, by path and shape."""
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = jax.eval_shape(make, plain)  # raises the transformation's own error, if it has one
    leaves, treedef = jax.tree.flatten_with_path(plain)
    flat_specs = treedef.flatten_up_to(specs)

    def init(sharded: set[int]) -> Tree:
        """Types of the state if only these parameters are sharded; None if ``tx.init`` fails."""
        some = [spec if i in sharded else PartitionSpec() for i, spec in enumerate(flat_specs)]
        try:
            return _typed_init(make, params, treedef.unflatten(some), mesh)
        except Exception:
            return None

    works = {i for i in range(len(leaves)) if init({i}) is not None}
    typed = init(works)
    if typed is None:
        works = set()
        typed = state
    others = (i for i in range(len(leaves)) if i not in works)
    left = {(leaves[i][0], leaves[i][1].shape): flat_specs[i] for i in others}
    warn(
        f"the transformation's init does not work on sharded types ({type(error).__name__}: "
        f"{error}); state of {', '.join(repr(path_str(path)) for path, _ in left)} is matched to "
        "parameters by path and shape, and replicated where that finds none."
    )

    def match(path: Any, leaf: Array, like: Array) -> PartitionSpec:
        ends = range(len(path) + 1)
        within = ((path[i:j], leaf.shape) for i in ends for j in reversed(ends[i:]))
        return next((left[key] for key in within if key in left), _spec_of(like))

    return jax.tree.map_with_path(match, state, typed)
