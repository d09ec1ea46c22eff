"""How kernels run: in programs for which platform, on which shards, and with the parameters inside.

A kernel sees the arrays of one device: ``sharding`` says how they are sharded.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from optax_ext._matrix_passes import abstract, in_this_mesh

Dims = tuple[int, ...]
Path = tuple[Any, ...]  # of a parameter in its tree


class Shards:
    """How the arrays of each parameter are on devices; here all are on one, unsharded."""

    interpret = False

    def shape_of(self, path: Path, shape: Dims) -> Dims | None:
        """Returns the shape of a shard; None if there is no such parameter of this shape."""
        return shape

    def run(
        self,
        path: Path,
        fn: Callable[..., list[jax.Array]],
        operands: Sequence[jax.Array],
        dims: Sequence[Dims],
        result_dims: Sequence[Dims],
    ) -> list[jax.Array]:
        """Calls ``fn`` on each device with its shards, and returns the results as global arrays.

        ``dims`` has, for each dim of each operand, the dim of the parameter that it is sharded as.
        """
        return fn(*operands)


# --- In programs for which platform ---------------------------------------------------------------


def calling_default(name: str) -> Primitive:
    """Returns a primitive that calls the jaxpr ``default``, one of its parameters.

    So do its derivatives and maps. What evaluates a jaxpr itself may do other things by its others.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    ad.primitive_jvps[primitive] = _jvp
    batching.primitive_batchers[primitive] = _map
    primitive.def_impl(_default)
    primitive.def_abstract_eval(lambda *_, default, **options: default.out_avals)
    mlir.register_lowering(primitive, mlir.lower_fun(_default, multiple_results=True))
    return primitive


def _default(*operands: jax.Array, default: ClosedJaxpr, **_: Any) -> list[jax.Array]:
    return jaxpr_as_fun(default)(*operands)


def _jvp(primals: Any, tangents: Any, *, default: ClosedJaxpr, **_: Any) -> Any:
    # What is in the jaxpr may ask which of its inputs vary.
    varying = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_varying(*values: Any) -> list[jax.Array]:
        operands = dict(enumerate(primals)) | dict(zip(varying, values, strict=True))
        return jaxpr_as_fun(default)(*operands.values())

    return jax.jvp(of_varying, [primals[i] for i in varying], [tangents[i] for i in varying])


def _map(operands: Any, dims: Any, *, default: ClosedJaxpr, **_: Any) -> Any:
    results = jax.vmap(jaxpr_as_fun(default), in_axes=tuple(dims))(*operands)
    return results, [0] * len(results)


# From operands to results, in two forms: ``default``, and for TPUs ``kernel``, a function that is
# traced where a program for them is lowered.
FOR_TPUS = calling_default("for_tpus")


def for_tpus(kernel: Callable[..., Any], default: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``kernel`` in programs for TPUs, ``default`` in others.

    Programs for several devices have ``default``, unless ``kernels_on`` says how arrays are
    sharded. ``kernel`` may close over no array that is traced here. Its argument ``read_only``
    has the ids of arrays that it cannot overwrite without a copy.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    closed, consts, results = with_constants(default, *arguments)

    def flat_kernel(*operands: jax.Array, read_only: Sequence[bool] = ()) -> list[jax.Array]:
        ids = frozenset(id(x) for x, kept in zip(operands, read_only, strict=False) if kept)
        given = jax.tree.unflatten(treedef, operands[len(consts) :])
        return jax.tree.leaves(kernel(*given, read_only=ids))

    forms = {"default": closed, "kernel": in_this_mesh(flat_kernel)}
    made = FOR_TPUS.bind(*consts, *leaves, **forms, anywhere=shards() is not None)
    return jax.tree.unflatten(results, made)


def with_constants(fn: Callable[..., Any], *types: Any) -> tuple[ClosedJaxpr, list[Any], Any]:
    """Traces a function: its jaxpr, the arrays that this takes first, the structure of results."""
    types = jax.tree.map(
        lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else abstract(jax.typeof(x)), types
    )
    closed, results = jax.make_jaxpr(fn, return_shape=True)(*types)
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return ClosedJaxpr(jaxpr, []), list(closed.consts), jax.tree.structure(results)


def _lower_for_tpus(ctx: Any, *operands: Any, kernel: Any, default: Any, anywhere: bool) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    # A program for several devices whose arrays are sharded by jit alone would not take a kernel.
    is_single = getattr(ctx.module_context.axis_context, "num_devices", None) == 1
    fn = jaxpr_as_fun(default)
    if "tpu" in platforms and (is_single or anywhere):
        fn = functools.partial(kernel, read_only=list(map(_is_read_only, operands)))
        if len(platforms) > 1:
            fn = functools.partial(_OF_SEVERAL.bind, kernel=fn, default=default)
    return mlir.lower_fun(fn, multiple_results=True)(ctx, *operands)


def _lower_for_tpus_of_several(ctx: Any, *operands: Any, kernel: Any, default: Any) -> Any:
    return mlir.lower_fun(kernel, multiple_results=True)(ctx, *operands)


def _is_read_only(operand: Any) -> bool:
    """Whether an operand is an argument of the program that is not donated to it."""
    function = getattr(operand.owner, "owner", None)  # otherwise an operation's result
    if function is None or str(function.attributes.get("sym_name")) != '"main"':
        return False
    donated = function.attributes["arg_attrs"][operand.arg_number]
    return not {"tf.aliasing_output", "jax.buffer_donor"} & {x.name for x in donated}


# Not cached, for cached rules see operands of a function of their own. In programs for several
# platforms JAX chooses between cached rules alone.
mlir.register_lowering(FOR_TPUS, _lower_for_tpus, cacheable=False)
_OF_SEVERAL = calling_default("for_tpus_of_several_platforms")
mlir.register_lowering(_OF_SEVERAL, _lower_for_tpus_of_several, platform="tpu")

# --- On which shards ------------------------------------------------------------------------------

# Between the step and a transformation inside others, of which MultiSteps and lookahead pass
# on no extra arguments.
_SHARDS: contextvars.ContextVar[Shards | None] = contextvars.ContextVar("shards", default=None)


def shards() -> Shards | None:
    """Returns how arrays are sharded where this is traced; None on one device."""
    return _SHARDS.get()


@contextlib.contextmanager
def kernels_on(shards: Shards) -> Iterator[None]:
    """Kernels traced here run on these shards."""
    token = _SHARDS.set(shards)
    try:
        yield
    finally:
        _SHARDS.reset(token)


def update_params_of(tx: optax.GradientTransformation) -> Callable[..., tuple[Any, Any]] | None:
    """Returns an attribute of ``update``: the same and ``optax.apply_updates`` in one."""
    return getattr(tx.update, "update_params", None)
