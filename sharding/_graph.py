"""A traced function as a list of equations that can be evaluated in parts."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal


@dataclasses.dataclass(frozen=True)
class Equation:
    primitive: Any
    params: dict[str, Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]


class Graph:
    """A traced function without inner jits. Values are numbers, inputs the first of them.

    Attributes:
      types: shape and dtype of every value.
      constants: the values that are known from the start.
      equations: in an order in which they can be evaluated.
      maker: of a value that is neither input nor constant, the number of its equation.
      loads: for each value the inputs in the host's memory that it depends on, as bits.
      outputs: the values that the function returns.
    """

    def __init__(self, fn: Callable[[list[Any]], list[Any]], inputs: Sequence[Any], host: list):
        types = [jax.typeof(x) for x in inputs]
        closed = jax.make_jaxpr(fn)(
            [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]
        )
        self.types: list[Any] = list(closed.in_avals)
        self.loads = [1 << i if there else 0 for i, there in enumerate(host)]
        self.constants: dict[int, Any] = {}
        self.equations: list[Equation] = []
        self.maker: dict[int, int] = {}
        self.outputs = self._inline(closed, tuple(range(len(inputs))))

    def _inline(self, closed: Any, inputs: Sequence[int]) -> list[int]:
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = self._constant(const, var.aval)

        def read(atom: Any) -> int:
            return self._constant(atom.val, atom.aval) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(map(read, eqn.invars))
            types = [var.aval for var in eqn.outvars]
            inner = eqn.params.get(_INLINED.get(eqn.primitive.name, ""))
            if inner is not None:
                results = self._inline(inner, operands)
            elif eqn.primitive.name == "optimization_barrier":
                # It keeps values apart from what is made of them, one by one as well as together.
                each = zip(operands, types, strict=True)
                results = [self._equation(eqn, (x,), [aval])[0] for x, aval in each]
            else:
                results = self._equation(eqn, operands, types)
            known |= zip(eqn.outvars, results, strict=True)
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: Any, operands: tuple[int, ...], types: list[Any]) -> list[int]:
        loads = functools.reduce(operator.or_, (self.loads[x] for x in operands), 0)
        results = [self._value(aval, loads) for aval in types]
        self.maker |= dict.fromkeys(results, len(self.equations))
        self.equations.append(Equation(eqn.primitive, eqn.params, operands, tuple(results)))
        return results

    def _value(self, aval: Any, loads: int) -> int:
        self.types.append(aval)
        self.loads.append(loads)
        return len(self.types) - 1

    def _constant(self, constant: Any, aval: Any) -> int:
        value = self._value(aval, 0)
        self.constants[value] = constant
        return value

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self.types[value].shape

    def needed(
        self, values: Iterable[int], known: Container[int]
    ) -> tuple[list[Equation], list[int]]:
        """The equations that lead from known values to these, in order; and the inputs needed."""
        equations, inputs, seen, left = set(), [], set(), list(values)
        while left:
            value = left.pop()
            if value in seen or value in known:
                continue
            seen.add(value)
            if value in self.maker:
                equations.add(self.maker[value])
                left += self.equations[self.maker[value]].operands
            else:
                inputs.append(value)
        return [self.equations[i] for i in sorted(equations)], sorted(inputs)


# Primitives that only call a function, and the parameter that holds it.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def bind(
    eqn: Equation, operands: Sequence[Any], params: dict[str, Any] | None = None
) -> Sequence[Any]:
    """The results of an equation's primitive, with other parameters than its own where given."""
    params = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    out = eqn.primitive.bind(*operands, **params)
    return out if eqn.primitive.multiple_results else [out]
