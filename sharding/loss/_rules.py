"""Rules of parameters: what a loss gets in the place of each, and where its gradient goes.

A program of a loss (of each device, partitioned, streamed from the host) is a list of rules.
"""

import collections
import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.traced_graph import bind
from sharding._types import Tree

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
    """A parameter in a loss that is evaluated, or a slice of one, before it is fetched."""

    number: int
    rule: Any  # a Rule
    held: jax.Array
    tap: jax.Array | None  # zeros, placed as the gradient, which they get; None if there is none
    fetched: dict[Any, jax.Array]  # by rule, for all uses in a layer
    moves: tuple[Any, ...] = ()  # the equations that move it, once it is fetched
    in_layer: bool = False  # whether a loop, a checkpoint or ``gather`` ends what is fetched of it
    repeats: bool = False  # whether a loop fetches the same in each run
    is_part: bool = False  # whether it is a view of the parameter
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
        for eqn in self.moves:
            (full,) = bind(eqn, [full])
        return full


def in_numbered_layers(names: Sequence[str]) -> list[bool]:
    """Whether each parameter is of one of several layers with numbers, such as ``layers/3/kernel``.

    Lists of modules have them, and modules of linen.
    """
    stems = [[name[: x.start()] for x in re.finditer(r"\d+(?=/|$)", name)] for name in names]
    layers = collections.defaultdict(set)
    for name, of_name in zip(names, stems, strict=True):
        for stem in of_name:
            layers[stem].add(name[len(stem) :].split("/")[0])
    return [any(len(layers[stem]) > 1 for stem in of_name) for of_name in stems]


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
