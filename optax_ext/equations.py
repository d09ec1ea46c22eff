"""What an equation of a jaxpr is, in one form whatever JAX makes of it; and what is refused.

JAX has two forms of some operations: a primitive, and, since 0.12 where a flag is set, an object
that one primitive, ``call_hi_primitive``, calls. All that reads or evaluates a jaxpr gets these
operations as records, and traces by ``trace``, which refuses what no reader knows.

| primitive | object | flag | record |
|---|---|---|---|
| ``jit``, ``pjit``, ``closed_call``, ``eval_jaxpr`` | | | ``Call`` |
| ``custom_jvp_call`` | ``CustomJVPTraced`` | ``jax_custom_jvp3`` | ``CustomDerivative`` |
| ``custom_vjp_call`` | ``CustomVJPTraced`` | ``jax_custom_vjp3`` | ``CustomDerivative`` |
| ``remat2`` | ``RematTraced`` | ``jax_remat3`` | ``Remat`` |
| ``name`` | ``CheckpointName`` | ``jax_remat3`` | ``Name`` |
| ``scan`` | | | ``Scan`` |
| | ``Scan3`` | ``jax_scan3`` | refused: JAX cannot differentiate it |
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax

from optax_ext.user_line import line_of


class Call(NamedTuple):
    """A function that is called, and nothing else."""

    body: Any  # its jaxpr, closed


class CustomDerivative(NamedTuple):
    """A function with derivatives of its own."""

    body: Any  # its jaxpr, closed


class Remat(NamedTuple):
    """A function that the backward pass computes again."""

    body: Any  # its jaxpr, which has no constants
    options: dict[str, Any]  # of ``jax.checkpoint``: policy and prevent_cse


class Name(NamedTuple):
    """``checkpoint_name``: its operand, with a name."""

    name: str


class Scan(NamedTuple):
    """A loop over slices."""

    body: Any  # its jaxpr, closed: of constants, what is carried, and slices
    num_consts: int
    num_carry: int
    options: dict[str, Any]  # of ``jax.lax.scan``: length, reverse, unroll


Record: TypeAlias = Call | CustomDerivative | Remat | Name | Scan

# The primitive that an object of JAX's takes the place of, by the object's class.
_PRIMITIVES = {
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "RematTraced": "remat2",
}


def _object_of(eqn: Any) -> Any:
    """The object that an equation calls; None for that of a primitive."""
    return eqn.params["_prim"] if eqn.primitive.name == "call_hi_primitive" else None


def name_of(eqn: Any) -> str:
    """The name of an equation's primitive, or of that which its object takes the place of."""
    if (called := _object_of(eqn)) is None:
        name: str = eqn.primitive.name
        return name
    module = type(called).__module__
    name = type(called).__name__
    return _PRIMITIVES.get(name, name) if module.startswith("jax.") else f"{module}.{name}"


def params_of(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation's primitive, or of its object."""
    called = _object_of(eqn)
    params: dict[str, Any] = eqn.params if called is None else called.params
    return params


def record_of(eqn: Any) -> Record | None:
    """What an equation of a jaxpr or of a graph is, if it is one of these records."""
    params = params_of(eqn)
    match name_of(eqn):
        case "jit" | "pjit" | "closed_call" | "eval_jaxpr":
            return Call(params["jaxpr" if "jaxpr" in params else "call_jaxpr"])
        case "custom_jvp_call" | "custom_vjp_call":
            body = params["traced"].jaxpr if "traced" in params else params["call_jaxpr"]
            return CustomDerivative(body)
        case "remat2":
            return Remat(params["jaxpr"], {key: params[key] for key in ("policy", "prevent_cse")})
        case "name":
            return Name(params["name"])
        case "scan":
            if "num_consts" in params:
                sizes = params["num_consts"], params["num_carry"]
            else:  # since jax 0.11
                consts, carry, *_ = params["ft_in"].unpack()
                sizes = len(list(consts)), len(list(carry))
            options = {key: params[key] for key in ("length", "reverse", "unroll")}
            return Scan(params["jaxpr"], *sizes, options)
    return None


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The functions that an equation calls, in the order of its parameters: bodies, branches."""
    for value in params_of(eqn).values():
        for item in value if isinstance(value, list | tuple) else (value,):
            traced = item.jaxpr if isinstance(item, jax.stages.Traced) else item
            jaxpr = getattr(traced, "jaxpr", traced)  # of a ClosedJaxpr
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


# --- What is refused ------------------------------------------------------------------------------


class UnknownOperationError(ValueError):
    """A traced function has an operation that may do more than its reader sees."""


# What holds functions, has effects or takes references, and is read, run as a whole, or refused by
# those readers that cannot do so. Kernels, reductions, scatters and random keys have functions of
# their own, which nothing looks into.
_KNOWN_NAMES = """
addupdate closed_call cond core_map custom_jvp_call custom_linear_solve custom_partitioning
custom_vjp_call custom_vmap_call composite compute_on debug_callback debug_print eval_jaxpr ffi_call
for_tpus freeze get inspect_sharding io_callback jit linear_call name new_ref pallas_call pjit
pure_callback quantized_product reduce reduce_window remat2 run_state scan select_and_gather_add
select_and_scatter select_and_scatter_add shard_map swap tpu_custom_call while with_handles
xla_metadata_call derivative_with_own_gradient CustomRoot OptRemat _RootLinearMap
"""
_KNOWN = frozenset(_KNOWN_NAMES.split())
_KNOWN_KINDS = ("random_", "scatter")


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The jaxpr of a function of these arguments, closed, and the types of its results.

    Raises:
      UnknownOperationError: if no reader knows an operation.
    """
    # A function of its own: JAX caches traces, and ``fn`` may close over what another one traces.
    closed, results = jax.make_jaxpr(functools.partial(fn), return_shape=True)(*args)
    check_known(closed.jaxpr)
    return closed, results


def check_known(jaxpr: Any) -> None:
    """Raises an ``UnknownOperationError`` at an operation that no reader knows."""
    seen = {id(jaxpr): jaxpr}
    pending = [jaxpr]
    while pending:
        for eqn in pending.pop().eqns:
            _check(eqn)
            if name_of(eqn) == "pallas_call":  # whose operations are those of a kernel
                continue
            for inner in inner_jaxprs(eqn):
                if id(inner) not in seen:
                    seen[id(inner)] = inner
                    pending.append(inner)


def _check(eqn: Any) -> None:
    name = name_of(eqn)
    if name == "Scan3":
        raise UnknownOperationError(
            f"lax.scan{_at(eqn)} was traced with the flag jax_scan3, and JAX cannot differentiate "
            "such loops. Leave it out: jax.config.update('jax_scan3', False) (docs: "
            "reference/versions)."
        )
    if name in _KNOWN or name.startswith(_KNOWN_KINDS):
        return
    if any(map(_holds_function, params_of(eqn).values())):
        what = "holds a function"
    elif any(hasattr(x.aval, "inner_aval") for x in (*eqn.invars, *eqn.outvars)):
        what = "reads or writes a reference"
    elif any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects):  # that of collectives
        what = "has side effects"
    else:
        return
    raise UnknownOperationError(
        f"{name}{_at(eqn)} {what}, and this library does not know the operation: where a function "
        "is computed in parts, it could be left out or run twice. Use operations of jax.numpy and "
        "jax.lax in its place, and a version of JAX that is tested (docs: reference/versions)."
    )


def _at(eqn: Any) -> str:
    line = line_of(eqn.source_info)
    return f" at {line}" if line else ""


def _holds_function(x: Any, depth: int = 3) -> bool:
    """Whether a parameter is a function or a jaxpr, or has one in it."""
    if isinstance(x, type | contextlib.ContextDecorator):  # a dtype, a mesh
        return False
    if hasattr(x, "eqns") or callable(x):
        return True
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, tuple | list | set | frozenset):
        x = getattr(x, "__dict__", {}).values()
    return depth > 0 and any(_holds_function(item, depth - 1) for item in x)
