"""A traced loss whose layers get their parameters through a hook, whatever code it is made of.

The layers are found: what ``gather`` marks, else the bodies of scans over stacked parameters. Any
other parameter passes through the hook where it is first used.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from optax_ext.traced_graph import bind_equation
from sharding._jaxprs import inner_jaxprs

_CALLS = ("jit", "pjit", "closed_call")
_CHECKPOINTS = ("checkpoint", "remat", "remat2")
# Operations on one array that only move or cast its elements.
_MOVES = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "transpose")


class Hook(NamedTuple):
    """What the loss gets for parameter ``number``, or for a slice of it in a loop.

    Attributes:
      fetch: ``fetch(number, held)``, once for all uses in a layer, without a derivative.
      tap: ``tap(number, fetched, tap)``, for each use: ``fetched``, whose gradient becomes that of
        ``tap``.
    """

    fetch: Callable[[int, jax.Array], jax.Array]
    tap: Callable[[int, jax.Array, jax.Array], jax.Array]


class _Param(NamedTuple):
    """A parameter, or a slice of one, before the hook."""

    number: int
    held: jax.Array
    tap: jax.Array
    fetched: list[jax.Array]  # none or one, for all that use it in a layer
    moves: tuple[Any, ...] = ()  # the equations that move it after the hook


class HookedLoss:
    """A loss that was traced, of parameters, which come first, and of other arguments."""

    def __init__(self, closed: Any, hook: Hook, mark: str, recompute: bool):
        """Sets what ``__call__`` uses.

        Args:
          closed: the trace.
          hook: of the parameters.
          mark: the name, by ``checkpoint_name``, of arrays that the loss passes to ``gather``.
          recompute: whether loops fetch again in the backward pass, and store what is fetched.
        """
        self.closed, self.hook, self.mark, self.recompute = closed, hook, mark, recompute
        self._marks: dict[int, bool] = {}  # by the id of a jaxpr, whether it has a mark

    def __call__(self, held: list[jax.Array], taps: list[jax.Array], *args: jax.Array) -> list[Any]:
        params = [_Param(i, *both, []) for i, both in enumerate(zip(held, taps, strict=True))]
        outs = self._run(self.closed.jaxpr, self.closed.consts, [*params, *args])
        return list(map(self._full, outs))

    def _full(self, x: Any) -> Any:
        """What the loss computes with."""
        if not isinstance(x, _Param):
            return x
        if not x.fetched:
            x.fetched.append(self.hook.fetch(x.number, x.held))
        full = self.hook.tap(x.number, x.fetched[0], x.tap)
        for eqn in x.moves:
            (full,) = bind_equation(eqn, [full])
        return full

    def _run(self, jaxpr: Any, consts: Any, args: Any, in_loop: bool = False) -> list[Any]:
        """The results of a jaxpr; parameters are ``_Param`` among values and results.

        ``in_loop`` says whether a loop stores what is computed, for its backward pass.
        """
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        for eqn in jaxpr.eqns:
            operands = [x.val if isinstance(x, Literal) else env[x] for x in eqn.invars]
            name = eqn.primitive.name
            if not any(isinstance(x, _Param) for x in operands) and not self._has_mark(eqn):
                out = bind_equation(eqn, operands)
            elif name == "optimization_barrier":
                out = _join(operands, bind_equation(eqn, list(map(_held, operands))))
            elif name == "convert_element_type" and not operands[0].moves:
                (cast,) = bind_equation(eqn, [operands[0].held])
                out = [operands[0]._replace(held=cast, fetched=[])]
            elif name in _MOVES and len(operands) == 1:
                out = [operands[0]._replace(moves=(*operands[0].moves, eqn))]
            elif name in _CALLS or (name == "custom_jvp_call" and self._has_mark(eqn)):
                inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
                out = self._run(inner.jaxpr, inner.consts, operands, in_loop)
            elif name in _CHECKPOINTS:
                body = eqn.params["jaxpr"]
                options = {key: eqn.params[key] for key in ("policy", "prevent_cse")}
                out = self._checkpoint(lambda args: self._run(body, (), args), operands, **options)  # noqa: B023
            elif name == "scan":
                out = self._scan(eqn, operands)
            elif in_loop and self.recompute and not self._is_mark(eqn):
                # What moves the parameter is computed again with it.
                run = lambda args: bind_equation(eqn, list(map(self._full, args)))  # noqa: B023, E731
                out = self._checkpoint(run, operands, prevent_cse=False)
            else:
                operands = list(map(self._full, operands))
                out = operands if self._is_mark(eqn) else bind_equation(eqn, operands)
            env |= zip(eqn.outvars, out, strict=True)
        return [x.val if isinstance(x, Literal) else env[x] for x in jaxpr.outvars]

    def _checkpoint(self, run: Any, operands: list[Any], **options: Any) -> list[Any]:
        """A part of the loss whose backward pass computes it again: what it fetches, too."""

        def again(held: list[Any], taps: list[Any]) -> list[Any]:
            given = iter(taps)
            args = [
                x._replace(held=y, tap=next(given), fetched=[]) if isinstance(x, _Param) else y
                for x, y in zip(operands, held, strict=True)
            ]
            return list(map(self._full, run(args)))

        taps = [x.tap for x in operands if isinstance(x, _Param)]
        return jax.checkpoint(again, **options)(list(map(_held, operands)), taps)

    def _scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """A loop, whose body gets slices of parameters through the hook."""
        options, body = eqn.params, eqn.params["jaxpr"]
        num_consts, num_carry = scan_sizes(options)
        inside = self._has_mark(eqn)
        consts = [x if inside else self._full(x) for x in operands[:num_consts]]
        rest = operands[num_consts:]
        carry = list(map(self._full, rest[:num_carry]))
        xs = [self._full(x) if isinstance(x, _Param) and x.moves else x for x in rest[num_carry:]]

        def step(carry: list[Any], slices: Any) -> tuple[list[Any], list[Any]]:
            held, given = slices[0], iter(slices[1])
            each = [
                _Param(x.number, y, next(given), []) if isinstance(x, _Param) else y
                for x, y in zip(xs, held, strict=True)
            ]
            out = self._run(body.jaxpr, body.consts, [*consts, *carry, *each], in_loop=True)
            out = list(map(self._full, out))
            return out[:num_carry], out[num_carry:]

        taps = [x.tap for x in xs if isinstance(x, _Param)]
        kept = {key: options[key] for key in ("length", "reverse", "unroll")}
        carry, outs = jax.lax.scan(step, carry, (list(map(_held, xs)), taps), **kept)
        return [*carry, *outs]

    def _has_mark(self, eqn: Any) -> bool:
        """Whether an equation, or one in it, marks what is to be hooked."""
        return self._is_mark(eqn) or any(map(self._contains_mark, inner_jaxprs(eqn)))

    def _is_mark(self, eqn: Any) -> bool:
        return eqn.primitive.name == "name" and eqn.params["name"] == self.mark

    def _contains_mark(self, jaxpr: Any) -> bool:
        if id(jaxpr) not in self._marks:
            self._marks[id(jaxpr)] = any(map(self._has_mark, jaxpr.eqns))
        return self._marks[id(jaxpr)]


def _held(x: Any) -> Any:
    return x.held if isinstance(x, _Param) else x


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan's equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, *_ = params["ft_in"].elts  # since jax 0.12
    return len(list(consts)), len(list(carry))


def _join(operands: list[Any], values: Sequence[Any]) -> list[Any]:
    """New values in the places of operands that are held."""
    return [
        x._replace(held=y, fetched=[]) if isinstance(x, _Param) else y
        for x, y in zip(operands, values, strict=True)
    ]
