"""A traced loss whose layers get their parameters through a hook, whatever code it is made of.

The layers are found: what ``gather`` marks, else the bodies of scans over stacked parameters. Any
other parameter passes through the hook where it is first used.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_ext.equations import Call, Name, Remat, Scan, record_of
from optax_ext.traced_graph import bind_equation
from sharding._jaxprs import inner_jaxprs
from sharding.step._gather_params import CALL, MARK

# Operations on one array that only move or cast its elements.
MOVES = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "transpose")


class HookedParam(NamedTuple):
    """A parameter, or a slice of one, before the hook."""

    number: int
    held: jax.Array
    tap: jax.Array
    fetched: dict[Any, jax.Array]  # by dtype, for all uses in a layer
    moves: tuple[Any, ...] = ()  # the equations that move it, after the hook
    in_layer: bool = False  # whether a loop, a checkpoint or ``gather`` ends what is fetched of it
    repeats: bool = False  # whether a loop fetches the same in each run
    dim: int = 0  # of what a device holds a shard of: the sharded dim, counted from the end
    dtype: Any = None  # in which it is fetched
    is_part: bool = False  # whether it is a view of the parameter

    def moved(self, full: jax.Array) -> jax.Array:
        """What the loss computes with, after the hook."""
        for eqn in self.moves:
            (full,) = bind_equation(eqn, [full])
        return full


class HookedLoss:
    """A traced loss of parameters, which come first, and of other arguments."""

    def __init__(self, closed: Any, recompute: bool, fetch: Any = None, tap: Any = None):
        """Of a trace, made while calls of ``gather`` mark arrays.

        For parameter ``number``, or a slice of it in a loop, the loss gets ``fetch(number, held)``,
        once for all uses in a layer, and of that for each use ``tap(number, fetched, tap)``, whose
        gradient becomes that of ``tap``. With ``recompute`` loops fetch again in the backward pass,
        and store what is held.
        """
        self.closed, self.recompute = closed, recompute
        self.fetch, self.tap = fetch, tap or (lambda number, fetched, tap: fetched)
        self.eqn: Any = None  # that is being evaluated
        self._marks: dict[int, bool] = {}  # by the id of a jaxpr, whether it has a mark

    def __call__(self, held: list[jax.Array], taps: list[jax.Array], *args: jax.Array) -> list[Any]:
        params = [
            HookedParam(i, x, tap, {}) for i, (x, tap) in enumerate(zip(held, taps, strict=True))
        ]
        return self.run([*params, *args])

    def run(self, args: list[Any]) -> list[Any]:
        """What the loss returns; parameters are ``HookedParam``."""
        return list(map(self._full, self._run(self.closed.jaxpr, self.closed.consts, args)))

    def _fetch(self, x: HookedParam) -> jax.Array:
        return self.fetch(x.number, x.held)

    def _full(self, x: Any) -> Any:
        """What the loss computes with."""
        if not isinstance(x, HookedParam):
            return x
        if x.dtype not in x.fetched:
            x.fetched[x.dtype] = self._fetch(x)
        return x.moved(self.tap(x.number, x.fetched[x.dtype], x.tap))

    def _run(self, jaxpr: Any, consts: Any, args: Any, in_loop: bool = False) -> list[Any]:
        """The results of a jaxpr; parameters among arguments and results are ``HookedParam``.

        ``in_loop`` says whether a loop stores what its backward pass needs of these values.
        """
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        for eqn in jaxpr.eqns:
            operands = [x.val if isinstance(x, Literal) else env[x] for x in eqn.invars]
            env |= zip(eqn.outvars, self._results(eqn, operands, in_loop), strict=True)
        return [np.asarray(x.val) if isinstance(x, Literal) else env[x] for x in jaxpr.outvars]

    def _results(self, eqn: Any, operands: list[Any], in_loop: bool) -> list[Any]:
        name = eqn.primitive.name
        if eqn.primitive is CALL:
            return self._call(eqn, operands)
        if not any(isinstance(x, HookedParam) for x in operands) and not self._has_mark(eqn):
            return list(bind_equation(eqn, operands))
        self.eqn = eqn
        if (views := self._views(eqn, operands)) is not None:
            return views
        if name == "optimization_barrier":
            return _with_held(operands, bind_equation(eqn, list(map(_held_array, operands))))
        if is_cast(eqn) and not operands[0].moves:  # less is fetched, often
            return _with_held(operands, bind_equation(eqn, list(map(_held_array, operands))))
        if name in MOVES and len(operands) == 1:
            return [operands[0]._replace(moves=(*operands[0].moves, eqn))]
        record = record_of(eqn)
        if isinstance(record, Call):
            return self._run(record.body.jaxpr, record.body.consts, operands, in_loop)
        if isinstance(record, Remat):
            again = functools.partial(self._run, record.body, ())
            return self._checkpoint(again, operands, **record.options)
        if isinstance(record, Scan):
            return self._scan(record, self._has_mark(eqn), operands)
        if self._is_mark(eqn):
            return list(map(self._full, map(_in_layer, operands)))
        use = lambda args: bind_equation(eqn, list(map(self._full, args)))  # noqa: E731
        if in_loop and self.recompute:
            return self._checkpoint(use, operands, prevent_cse=False)
        return list(use(operands))

    def _call(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """The results of ``with_handles``; here the function gets arrays."""
        out: list[Any] = eqn.params["fn"](*map(self._full, operands))
        return out

    def _views(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        """The results, where they are made of what is held, before the hook."""
        return None

    def _to_slice(self, param: HookedParam) -> Any:
        """What loops slice along its first dim: a parameter, or the array that it is."""
        return self._full(param) if param.moves else param

    def _checkpoint(self, run: Any, operands: list[Any], **options: Any) -> list[Any]:
        """A part of the loss that the backward pass computes again; it fetches again, too."""

        def again(held: list[Any], taps: list[Any]) -> list[Any]:
            given = map(_in_layer, _with_held(operands, held, taps))
            return list(map(self._full, run(list(given))))

        return jax.checkpoint(again, **options)(
            list(map(_held_array, operands)), _taps_of(operands)
        )

    def _scan(self, scan: Scan, has_mark: bool, operands: list[Any]) -> list[Any]:
        """A loop, whose body gets slices of parameters through the hook."""
        body, num_consts, num_carry = scan.body, scan.num_consts, scan.num_carry
        consts, rest = operands[:num_consts], operands[num_consts:]
        if not has_mark:  # fetched before the loop, for all its runs
            consts = list(map(self._full, consts))
        consts = [x._replace(repeats=True) if isinstance(x, HookedParam) else x for x in consts]
        carry = list(map(self._full, rest[:num_carry]))
        xs = [self._to_slice(x) if isinstance(x, HookedParam) else x for x in rest[num_carry:]]

        def step(carry: list[Any], slices: Any) -> tuple[list[Any], list[Any]]:
            # Constants that are parameters are fetched for the body alone.
            given = [*_with_held(consts, map(_held_array, consts)), *_with_held(xs, *slices)]
            given = list(map(_in_layer, given))
            args = [*given[:num_consts], *carry, *given[num_consts:]]
            out = self._run(body.jaxpr, body.consts, args, in_loop=True)
            out = list(map(self._full, out))
            return out[:num_carry], out[num_carry:]

        slices = list(map(_held_array, xs)), _taps_of(xs)
        carry, outs = jax.lax.scan(step, carry, slices, **scan.options)
        return [*carry, *outs]

    def _has_mark(self, eqn: Any) -> bool:
        """Whether an equation, or one in it, marks what is to be hooked."""
        return self._is_mark(eqn) or any(map(self._contains_mark, inner_jaxprs(eqn)))

    def _is_mark(self, eqn: Any) -> bool:
        return record_of(eqn) == Name(MARK)

    def _contains_mark(self, jaxpr: Any) -> bool:
        if id(jaxpr) not in self._marks:
            self._marks[id(jaxpr)] = any(map(self._has_mark, jaxpr.eqns))
        return self._marks[id(jaxpr)]


def is_cast(eqn: Any) -> bool:
    """Whether an equation casts to what has a gradient of a parameter's kind."""
    is_cast = eqn.primitive.name == "convert_element_type"
    return is_cast and jnp.issubdtype(eqn.params["new_dtype"], jnp.floating)


def _in_layer(x: Any) -> Any:
    return x._replace(in_layer=True) if isinstance(x, HookedParam) else x


def _held_array(x: Any) -> Any:
    return x.held if isinstance(x, HookedParam) else x


def _taps_of(operands: list[Any]) -> list[Any]:
    return [x.tap for x in operands if isinstance(x, HookedParam)]


def _with_held(operands: list[Any], values: Any, taps: Any = None) -> list[Any]:
    """New values of operands; of parameters, of what is held, and taps if given."""
    given = iter(_taps_of(operands) if taps is None else taps)
    return [
        x._replace(held=y, tap=next(given), fetched={}) if isinstance(x, HookedParam) else y
        for x, y in zip(operands, values, strict=True)
    ]
