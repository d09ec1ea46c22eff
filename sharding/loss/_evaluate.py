"""Evaluates a traced loss, whatever code it is made of, by rules of its parameters and equations.

Layers are found: what ``gather`` marks, else the bodies of scans over stacked parameters. A rule
fetches a parameter once for all its uses in a layer; any other parameter is fetched where it is
first used, or, if its rule says so, once more in the backward pass.

Where a part of a loss runs again it prints no more than under ``jit``: once, and once more where
the loss itself says that it is computed again, by ``jax.checkpoint``.
"""

import collections
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from optax_ext.equations import Call, Name, Remat, Scan, inner_jaxprs, name_of, record_of
from optax_ext.traced_graph import Equation, bind
from optax_ext.user_line import line_of
from sharding.loss._marks import CALL, MARK
from sharding.loss._rules import Param, after_input, held_arrays, is_param, taps_of, with_held


class Run(enum.Enum):
    """Whether a part of a loss runs for the first time, which decides what it prints."""

    FIRST = "everything"
    AGAIN = "what is in checkpoints"
    SILENTLY = "nothing"


class Fetch(NamedTuple):
    """A place where a loss gets a parameter, or a part of it."""

    number: int
    in_layer: bool  # or in what the backward pass computes again
    repeats: bool  # the same in each run of a loop
    is_part: bool
    eqn: Any  # that uses it; None for an output
    encloses_mark: bool  # whether the equation has a layer in it, which ``gather`` marks

    @property
    def place(self) -> str:
        """The operation, and the line of the user's code that it is from."""
        if self.eqn is None:
            return "as an output"
        name = name_of(self.eqn)
        name = self.eqn.params["name"] if name in ("jit", "pjit") else name
        line = line_of(self.eqn.source_info)
        return f"in {name}" + (f" at {line}" if line else "")


# The results of an equation of some operands, among them perhaps parameters.
EquationRule = Callable[["Evaluator", Any, list[Any]], Sequence[Any]]


class Evaluator:
    """One evaluation of a traced loss."""

    def __init__(
        self,
        recompute: bool = False,
        run: Run = Run.FIRST,
        equations: Mapping[Any, EquationRule] | None = None,
    ):
        """With ``recompute`` loops fetch again in the backward pass, and store what is held.

        ``equations`` are rules of equations, by their primitives. They mark places as ``gather``
        does.
        """
        self.recompute, self.how, self.equations = recompute, run, equations or {}
        self.fetches: list[Fetch] = []
        self._eqn: Any = None  # that is being evaluated
        self._marks: dict[int, bool] = {}  # by the id of a jaxpr, whether it has a mark

    def __call__(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """What a trace returns; arguments that are parameters are ``Param``."""
        return list(map(self.full, self.run(closed.jaxpr, closed.consts, args)))

    def full(self, x: Any) -> Any:
        """What an equation reads."""
        if not is_param(x):
            return x
        if x.rule not in x.fetched:
            eqn = self._eqn
            inside = eqn is not None and self._has_mark(eqn) and not self._is_mark(eqn)
            where = x.in_layer, x.repeats, x.is_part, eqn, inside
            self.fetches.append(Fetch(x.number, *where))
        return x.full()

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], in_loop: bool = False
    ) -> list[Any]:
        """The results of a jaxpr; parameters among arguments and results are ``Param``.

        ``in_loop`` says whether a loop stores what its backward pass needs of these values.
        """
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        outer, reads = self._eqn, collections.Counter[Any]()
        if any(is_param(x) and x.rule.again for x in args):
            reads = _num_reads(jaxpr)
        for eqn in jaxpr.eqns:
            operands = [x.val if isinstance(x, Literal) else env[x] for x in eqn.invars]
            for k, x in enumerate(operands):
                if is_param(x) and reads[eqn.invars[k]] > 1:
                    operands[k] = x._replace(is_shared=True)
            env |= zip(eqn.outvars, self.results(eqn, operands, in_loop), strict=True)
        self._eqn = outer
        return [np.asarray(x.val) if isinstance(x, Literal) else env[x] for x in jaxpr.outvars]

    def results(self, eqn: Any, operands: list[Any], in_loop: bool = False) -> Sequence[Any]:
        """The results of an equation of a jaxpr or of a graph."""
        prints_less = self.how is not Run.FIRST and prints(eqn)
        has_params = any(map(is_param, operands))
        has_mark = bool(self.equations) and self._has_mark(eqn)
        if not (has_params or prints_less or has_mark):
            return bind(eqn, operands)
        self._eqn = eqn
        if eqn.primitive in self.equations:
            return self.equations[eqn.primitive](self, eqn, operands)
        if has_params and (views := self._views(eqn, operands)) is not None:
            return views

        # Functions whose equations are evaluated one by one.
        record = record_of(eqn)
        if isinstance(record, Call):
            return self.run(record.body.jaxpr, record.body.consts, operands, in_loop)
        if isinstance(record, Remat) and prints_less:  # it is computed again: now
            inside = Run.FIRST if self.how is Run.AGAIN else self.how
            return call(ClosedJaxpr(record.body, ()), operands, inside)
        if isinstance(record, Remat):
            again = lambda args: self.run(record.body, (), args)  # noqa: E731
            return self._checkpoint(again, operands, **record.options)
        if isinstance(record, Scan):
            return self._scan(record, self._has_mark(eqn), operands)
        if prints_less:
            return self._without_prints(eqn, operands)

        # Equations that read what is fetched.
        if eqn.primitive is CALL:
            of_arrays: list[Any] = eqn.params["fn"](*map(self.full, operands))
            return of_arrays
        if self._is_mark(eqn):
            return [self.full(x._replace(in_layer=True) if is_param(x) else x) for x in operands]
        read = lambda args: bind(eqn, list(map(self.full, args)))  # noqa: E731
        if in_loop and self.recompute:
            return self._checkpoint(read, operands, prevent_cse=False)
        if self.recompute and self._fetches_again(eqn, operands):
            # Not fetched before its input exists; ``after_input`` says more.
            return self._checkpoint(read, operands, after=True)
        return read(operands)

    def _fetches_again(self, eqn: Any, operands: list[Any]) -> bool:
        """Whether its parameters are fetched again backward; an equation computes nothing again."""
        params = [x for x in operands if is_param(x) and x.held.ndim > 1]  # vectors may stay
        own = any(x.rule.again and not (x.in_layer or x.is_shared) for x in params)
        effects = getattr(eqn, "effects", ())  # equations of graphs that are evaluated have none
        return own and not (effects or any(inner_jaxprs(eqn)))

    def _views(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        """The results of an equation that comes before parameters are fetched; None if none."""
        x, *rest = operands
        if is_param(x) and not any(map(is_param, rest)):
            views: list[Any] | None = x.rule.view(x, eqn, rest)
            if views is not None:
                return views
        if eqn.primitive.name == "optimization_barrier":
            return with_held(operands, bind(eqn, held_arrays(operands)))
        return None

    def _checkpoint(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        operands: list[Any],
        after: bool = False,
        **options: Any,
    ) -> list[Any]:
        """A part of the loss that the backward pass computes again; it fetches again, too."""

        def again(held: list[Any], taps: list[Any]) -> list[Any]:
            if after:
                _, held = after_input([], held)
            given = with_held(operands, held, taps)
            given = [x._replace(in_layer=True) if is_param(x) else x for x in given]
            return list(map(self.full, run(given)))

        found: list[Any] = jax.checkpoint(again, **options)(
            held_arrays(operands), taps_of(operands)
        )
        return found

    def _scan(self, scan: Scan, has_mark: bool, operands: list[Any]) -> list[Any]:
        """A loop, whose body gets slices of parameters by their rules."""
        body, num_consts, num_carry = scan.body, scan.num_consts, scan.num_carry
        consts, rest = operands[:num_consts], operands[num_consts:]
        if not has_mark:  # fetched before the loop, for all its runs
            consts = list(map(self.full, consts))
        consts = [x._replace(repeats=True) if is_param(x) else x for x in consts]
        carry = list(map(self.full, rest[:num_carry]))
        xs = [self._stack(x) if is_param(x) else x for x in rest[num_carry:]]

        def step(carry: list[Any], slices: Any) -> tuple[list[Any], list[Any]]:
            # Constants that are parameters are fetched for the body alone.
            given = [*with_held(consts, held_arrays(consts)), *with_held(xs, *slices)]
            given = [x.rule.layer(x) if is_param(x) else x for x in given]
            args = [*given[:num_consts], *carry, *given[num_consts:]]
            out = self.run(body.jaxpr, body.consts, args, in_loop=True)
            out = list(map(self.full, out))
            return out[:num_carry], out[num_carry:]

        slices = held_arrays(xs), taps_of(xs)
        carry, outs = lax.scan(step, carry, slices, **scan.options)
        return [*carry, *outs]

    def _stack(self, x: Param) -> Any:
        """What loops slice along its first dim: a parameter, or the array that it is."""
        stack = x.rule.stack(x)
        return self.full(x) if stack is None else stack

    def _without_prints(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """The results of a branch or a loop that prints less; none of a print."""
        params, run = eqn.params, self.how
        if eqn.primitive.name == "cond":
            branches = [lambda *x, f=f: call(f, x, run) for f in params["branches"]]
            of_branch: list[Any] = lax.switch(operands[0], branches, *operands[1:])
            return of_branch
        if eqn.primitive.name != "while":
            return []
        first, second = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = operands[:first], operands[first : first + second]
        found: list[Any] = lax.while_loop(
            lambda carry: call(params["cond_jaxpr"], [*of_cond, *carry], run)[0],
            lambda carry: call(params["body_jaxpr"], [*of_body, *carry], run),
            operands[first + second :],
        )
        return found

    # --- Marks ------------------------------------------------------------------------------------

    def _has_mark(self, eqn: Any) -> bool:
        """Whether an equation, or one in it, marks where parameters are to be fetched."""
        return self._is_mark(eqn) or any(map(self._contains_mark, inner_jaxprs(eqn)))

    def _is_mark(self, eqn: Any) -> bool:
        return eqn.primitive in self.equations or record_of(eqn) == Name(MARK)

    def _contains_mark(self, jaxpr: Any) -> bool:
        if id(jaxpr) not in self._marks:
            self._marks[id(jaxpr)] = any(map(self._has_mark, jaxpr.eqns))
        return self._marks[id(jaxpr)]


def _num_reads(jaxpr: Any) -> collections.Counter[Any]:
    """How many operands each value of a jaxpr is."""
    operands = (x for eqn in jaxpr.eqns for x in eqn.invars)
    return collections.Counter(x for x in operands if not isinstance(x, Literal))


def prints(eqn: Any) -> bool:
    """Whether an equation prints, or one inside of it."""
    results = eqn.results if isinstance(eqn, Equation) else eqn.outvars
    return not results or any(jaxpr.effects for jaxpr in inner_jaxprs(eqn))


def call(closed: ClosedJaxpr, args: Sequence[Any], run: Run) -> list[Any]:
    """The results of a jaxpr, without parameters."""
    if run is Run.FIRST or not closed.jaxpr.effects:
        return list(jaxpr_as_fun(closed)(*args))
    return Evaluator(run=run)(closed, args)


def evaluate(equations: Iterable[Equation], values: dict[Any, Any], run: Run) -> None:
    """Adds the results of equations of a graph to ``values``, which has their operands."""
    evaluator = Evaluator(run=run)
    for eqn in equations:
        out = evaluator.results(eqn, [values[v] for v in eqn.operands])
        values |= zip(eqn.results, out, strict=True)
