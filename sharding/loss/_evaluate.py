"""Evaluates a traced loss, whatever code it is made of, by rules of its parameters and equations.

The rule of a parameter says what the loss gets in its place, and where its gradient goes. A view of
a loss (of each device, of the whole mesh, streamed from the host) is a list of rules.

Layers are found: what ``gather`` marks, else the bodies of scans over stacked parameters. A rule
fetches a parameter once for all its uses in a layer; any other parameter is fetched where it is
first used, or, if its rule says so, once more in the backward pass.
"""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from optax_ext.equations import Call, Name, Remat, Scan, inner_jaxprs, name_of, record_of
from optax_ext.traced_graph import Equation, bind
from optax_ext.user_line import line_of
from sharding._types import Tree
from sharding.loss._marks import CALL, MARK

# --- Rules of parameters --------------------------------------------------------------------------

# Operations on one array that only move or cast its elements.
MOVES = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "transpose")


class Rule(Protocol):
    """What is done to one parameter, or to a view of it. Rules are compared by value."""

    @property
    def by_use(self) -> bool:
        """Whether the gradient of each use is reduced, or the sum over all uses in a layer."""

    @property
    def again(self) -> bool:
        """Whether outside of layers, too, its one use fetches it, and again in the backward pass.

        What several equations read is held: each would send it, and reduce a gradient.
        """

    def fetch(self, held: jax.Array) -> jax.Array:
        """From what is stored to what an equation reads; it is not differentiated."""

    def reduce(self, grad: jax.Array, tap: Any) -> jax.Array:
        """From the cotangent of what was fetched to the gradient, of the type of ``tap``."""

    def view(self, x: "Param", eqn: Any, rest: list[Any]) -> "list[Param] | None":
        """The results of an equation of a parameter and of ``rest``, before it is fetched.

        None if the equation needs what is fetched.
        """

    def stack(self, x: "Param") -> "Param | None":
        """What a loop slices along the first dim; None if that is what is fetched."""

    def layer(self, x: "Param") -> "Param":
        """A slice of a stack, or a constant, in the body of the loop."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tapped(rule: Rule, tap_type: Any, full: jax.Array, tap: jax.Array) -> jax.Array:
    """What was fetched; its gradient, reduced, becomes that of ``tap``."""
    del rule, tap_type, tap
    return full


# Forward it is the very array: a loop over layers stores a copy of what it did not get as it is.
_tapped.defvjp(
    lambda rule, tap_type, full, tap: (full, None),
    lambda rule, tap_type, _, grad: (None, rule.reduce(grad, tap_type)),
)


def tapped(rule: Rule, full: jax.Array, tap: jax.Array | None) -> jax.Array:
    """What was fetched, where ``tap`` is differentiated in the place of the parameter."""
    return full if tap is None else _tapped(rule, jax.typeof(tap), full, tap)


def use(rule: Rule, held: jax.Array, tap: jax.Array | None) -> jax.Array:
    """What the loss computes with, of a parameter as it is held."""
    return tapped(rule, rule.fetch(held), tap)


class Param(NamedTuple):
    """A parameter in a loss that is evaluated, or a slice of one, before it is fetched.

    A value, of which equations make others. What is fetched is shared by all that are made of the
    same array, until a layer has an array of its own.
    """

    number: int
    rule: Any  # a Rule
    held: jax.Array
    tap: jax.Array | None  # zeros, placed as the gradient, which they get; None if there is none
    fetched: dict[Any, jax.Array]  # by rule
    moves: tuple[Any, ...] = ()  # the equations that move it, once it is fetched
    # Where it is read.
    in_layer: bool = False  # whether a loop, a checkpoint or ``gather`` ends what is fetched of it
    repeats: bool = False  # whether a loop fetches the same in each run
    is_shared: bool = False  # whether several equations read it

    def moved_by(self, eqn: Any) -> "Param":
        return self._replace(moves=(*self.moves, eqn))

    def of_held(self, held: jax.Array, tap: jax.Array | None) -> "Param":
        """With what is made of what is held, and a tap for that."""
        return self._replace(held=held, tap=tap, fetched={})

    def full(self) -> jax.Array:
        """What the loss computes with."""
        rule, fetched = self.rule, self.fetched
        if rule not in fetched:
            fetched[rule] = rule.fetch(self.held) if rule.by_use else use(rule, self.held, self.tap)
        full = tapped(rule, fetched[rule], self.tap) if rule.by_use else fetched[rule]
        return self.moved(full)

    def moved(self, full: jax.Array) -> jax.Array:
        """What was fetched, moved as the loss moves it."""
        for eqn in self.moves:
            (full,) = bind(eqn, [full])
        return full


def is_param(x: Any) -> bool:
    return isinstance(x, Param)


def held_arrays(operands: Sequence[Any]) -> list[Any]:
    """Operands as they are held."""
    return [x.held if is_param(x) else x for x in operands]


def taps_of(operands: Sequence[Any]) -> list[Any]:
    return [x.tap for x in operands if is_param(x)]


def with_held(operands: Sequence[Any], values: Sequence[Any], taps: Any = None) -> list[Any]:
    """New values of operands; of parameters, of what is held, and taps if given."""
    given = iter(taps_of(operands) if taps is None else taps)
    return [
        x.of_held(y, next(given)) if is_param(x) else y
        for x, y in zip(operands, values, strict=True)
    ]


def is_cast(eqn: Any) -> bool:
    """Whether an equation casts to floating numbers."""
    casts = eqn.primitive.name == "convert_element_type"
    return casts and jnp.issubdtype(eqn.params["new_dtype"], jnp.floating)


def after_input(params: Tree, x: Tree) -> tuple[Any, Any]:
    """Parameters and the input of their layer behind one barrier.

    It keeps XLA from gathering the parameters of all layers before their inputs exist. The layer
    uses both outputs, so that the transpose orders the backward pass in the same way.
    """
    arrays, treedef = jax.tree.flatten(x)
    floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]
    params, behind = lax.optimization_barrier((params, [arrays[i] for i in floating]))
    for i, array in zip(floating, behind, strict=True):
        arrays[i] = array
    return params, treedef.unflatten(arrays)


# --- The evaluation -----------------------------------------------------------------------------


class Fetch(NamedTuple):
    """A place where a loss gets a parameter, or a part of it."""

    number: int
    rule: Any
    in_layer: bool  # or in what the backward pass computes again
    repeats: bool  # the same in each run of a loop
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
        self, recompute: bool = False, equations: Mapping[Any, EquationRule] | None = None
    ):
        """With ``recompute`` loops fetch again in the backward pass, and store what is held.

        ``equations`` are rules of equations, by their primitives. They mark places as ``gather``
        does.
        """
        self.recompute, self.equations = recompute, equations or {}
        self.fetches: list[Fetch] = []
        self._eqn: Any = None  # that is being evaluated
        self._in_scan = False  # in checkpoints of its body, too, whose values no loop stores
        self._marks: dict[int, bool] = {}  # by the id of a jaxpr, whether it has a mark

    def __call__(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """What a trace returns; arguments that are parameters are ``Param``."""
        return list(map(self.full, self.run(closed.jaxpr, closed.consts, args)))

    def full(self, x: Any) -> Any:
        """What an equation reads."""
        if not is_param(x):
            return x
        if x.rule not in x.fetched:
            self.note(x)
        return x.full()

    def note(self, x: Param) -> None:
        """Adds a place where a parameter is fetched."""
        eqn = self._eqn
        inside = eqn is not None and self._has_mark(eqn) and not self._is_mark(eqn)
        self.fetches.append(Fetch(x.number, x.rule, x.in_layer, x.repeats, eqn, inside))

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], in_loop: bool = False
    ) -> list[Any]:
        """The results of a jaxpr; parameters among arguments and results are ``Param``.

        ``in_loop`` says whether a loop stores what its backward pass needs of these values.
        """
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= zip(jaxpr.invars, args, strict=True)
        outer = self._eqn
        self._add([(eqn, eqn.invars, eqn.outvars) for eqn in jaxpr.eqns], values, in_loop)
        self._eqn = outer
        return [np.asarray(x.val) if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]

    def evaluate(
        self, equations: Sequence[Equation], values: dict[Any, Any], in_loop: bool = False
    ) -> None:
        """Adds the results of equations of a graph to ``values``, which has their operands."""
        self._add([(eqn, eqn.operands, eqn.results) for eqn in equations], values, in_loop)

    def _add(
        self, equations: Sequence[tuple[Any, Any, Any]], values: dict[Any, Any], in_loop: bool
    ) -> None:
        """Adds the results of equations, each given with its operands and its results."""
        given = (v for _, operands, _ in equations for v in operands)
        reads = collections.Counter(v for v in given if not isinstance(v, Literal))
        for eqn, operands, results in equations:
            read = [v.val if isinstance(v, Literal) else values[v] for v in operands]
            for k, x in enumerate(read):
                if is_param(x) and reads[operands[k]] > 1:
                    read[k] = x._replace(is_shared=True)
            values |= zip(results, self.results(eqn, read, in_loop), strict=True)

    def results(self, eqn: Any, operands: list[Any], in_loop: bool = False) -> Sequence[Any]:
        """The results of an equation of a jaxpr or of a graph."""
        has_params = any(map(is_param, operands))
        if not has_params and not (self.equations and self._has_mark(eqn)):
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
        if isinstance(record, Remat):
            again = lambda args: self.run(record.body, (), args)  # noqa: E731
            return self._checkpoint(again, operands, **record.options)
        if isinstance(record, Scan):
            return self._scan(record, self._has_mark(eqn), operands)

        # Equations that read what is fetched.
        if eqn.primitive is CALL:
            of_arrays: list[Any] = eqn.params["fn"](*map(self.full, operands))
            return of_arrays
        if self._is_mark(eqn):
            return [self.full(x._replace(in_layer=True) if is_param(x) else x) for x in operands]
        read = lambda args: self._read(eqn, args)  # noqa: E731
        if in_loop and self.recompute:
            return self._checkpoint(read, operands, prevent_cse=False)
        if self.recompute and self._fetches_again(eqn, operands):
            # Not fetched before its input exists; ``after_input`` says more.
            return self._checkpoint(read, operands, after=True)
        return read(operands)

    def _read(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """The results of an equation, which fetches parameters in its own form, or in full."""
        own = eqn.params.get("read")
        found = own and own(self, operands)
        return found or bind(eqn, list(map(self.full, operands)))

    def _fetches_again(self, eqn: Any, operands: list[Any]) -> bool:
        """Whether its parameters are fetched again backward; an equation computes nothing again."""
        params = [x for x in operands if is_param(x) and x.held.ndim > 1]  # vectors may stay
        own = any(x.rule.again and not (x.in_layer or x.is_shared) for x in params)
        plain = eqn.params.get("plain", eqn)  # of a product in few bits, which is one, too
        effects = getattr(plain, "effects", ())  # equations of graphs that are evaluated have none
        return own and not (effects or any(inner_jaxprs(plain)))

    def _views(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        """The results of an equation that comes before parameters are fetched; None if none."""
        x, *rest = operands
        if is_param(x) and not any(map(is_param, rest)):
            views: list[Any] | None = x.rule.view(x, eqn, rest)
            if views is not None:
                return views
        if eqn.primitive.name == "optimization_barrier":
            taps = taps_of(operands)
            # In a loop gradients do not wait: XLA:GPU reduces them beside the next layer.
            behind = [] if self._in_scan else taps
            held, behind = lax.optimization_barrier((held_arrays(operands), behind))
            return with_held(operands, held, behind or taps)
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
            outer, self._in_scan = self._in_scan, True
            out = self.run(body.jaxpr, body.consts, args, in_loop=True)
            out = list(map(self.full, out))
            self._in_scan = outer
            return out[:num_carry], out[num_carry:]

        slices = held_arrays(xs), taps_of(xs)
        carry, outs = lax.scan(step, carry, slices, **scan.options)
        return [*carry, *outs]

    def _stack(self, x: Param) -> Any:
        """What loops slice along its first dim: a parameter, or the array that it is."""
        stack = x.rule.stack(x)
        return self.full(x) if stack is None else stack

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
