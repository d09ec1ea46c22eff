"""A loss of forms: an unmodified loss, traced, that decodes one layer at a time.

A loop over stacked parameters takes the parts of a form as its slices, and decodes in its body. The
backward pass decodes again. A product with an adapted matrix is two narrow ones beside the frozen
one, so that no gradient of a full matrix exists:

    x W = x W_0 + s (x A) B
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.equations import trace
from optax_ext.traced_graph import bind
from sharding._types import Tree
from sharding.loss._evaluate import Evaluator, Param, is_cast, is_param
from sharding.loss._loss_options import AnyLoss, Loss, as_loss
from sharding.stored._forms import Adapted, decoded, is_form


def loss_of(given: AnyLoss, *, dropout: float = 0.0) -> Loss:
    """The loss of parameters of which some are stored in forms.

    It is the given loss of what the forms decode to, whatever framework that is written in, and is
    itself a loss like any other, of whose stacks ``Zero`` gathers the codes of one layer at a time.

    Args:
      given: a function of ``(params, batch, ...)`` or a ``Loss``; it is not changed.
      dropout: the rate before A of each adapter. The loss then takes a key.

    Returns:
      A ``Loss`` with the same options.

    Raises:
      ValueError: if the rate is not at least 0 and below 1, or the loss takes keys of examples.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from sharding import stored
      >>> params = {"w": jnp.ones((64, 64))}
      >>> forms = {"w": (stored.frozen(4), stored.lora(rank=4))}
      >>> params = stored.store(params, forms, jax.random.key(0))
      >>> fn = stored.loss_of(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
      >>> float(fn(params, jnp.ones((1, 64))))
      4096.0
    """
    inner = as_loss(given)
    if not 0 <= dropout < 1 or (dropout and inner.rngs == "per_example"):
        raise ValueError(
            "dropout must be at least 0 and below 1, of a loss that takes no keys of examples, got "
            f"{dropout!r} with rngs={inner.rngs!r}."
        )

    def fn(params: Tree, *args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_form)
        if dropout:
            leaves = _with_keys(leaves, dropout, args[-1])
            args = args if inner.rngs else args[:-1]
        if not any(map(is_form, leaves)):
            return inner(params, *args)
        rest, rest_treedef = jax.tree.flatten(args)

        def flat(*values: Any) -> Any:
            own, others = values[: len(leaves)], values[len(leaves) :]
            return inner(treedef.unflatten(own), *rest_treedef.unflatten(others))

        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) if is_form(x) else x for x in leaves]
        closed, results = trace(flat, *types, *rest)
        rule = StoredRule()
        held = [Param(i, rule, x, None, {}) if is_form(x) else x for i, x in enumerate(leaves)]
        evaluator = Evaluator(recompute=True, equations={lax.dot_general_p: _product_with_form})
        return jax.tree.unflatten(jax.tree.structure(results), evaluator(closed, [*held, *rest]))

    return dataclasses.replace(inner, fn=fn, rngs=inner.rngs or bool(dropout))


def _with_keys(leaves: list[Any], dropout: float, key: jax.Array) -> list[Any]:
    """Parameters, of which each adapted array of a stack has a key of its own."""

    def with_key(i: int, x: Any) -> Any:
        if not isinstance(x, Adapted):
            return x
        keys = jax.random.split(jax.random.fold_in(key, i), x.shape[: x.stacked])
        return dataclasses.replace(x, key=keys, dropout=dropout)

    return list(map(with_key, range(len(leaves)), leaves))


@dataclasses.dataclass(frozen=True)
class StoredRule:
    """How a loss reads a form; its parts are differentiated as they are.

    Before it is decoded no more is done to it than that it is cast, or sliced by layers.
    """

    by_use = False
    again = True

    def fetch(self, held: Any) -> jax.Array:
        full: jax.Array = decoded(held)
        return full

    def reduce(self, grad: jax.Array, tap: Any) -> jax.Array:
        raise AssertionError("a form has no tap")

    def view(self, x: Param, eqn: Any, rest: list[Any]) -> list[Param] | None:
        """Casts of a whole stack, and its layers, before it is decoded."""
        if is_cast(eqn):
            return [x.moved_by(eqn)]
        if rest:
            return None
        form: Any = x.held
        params = eqn.params
        taken: Any = None  # an index, or several
        if eqn.primitive.name == "squeeze" and params["dimensions"] == (0,):
            taken = 0
        elif eqn.primitive.name == "slice" and params["strides"] is None:
            starts, limits = params["start_indices"], params["limit_indices"]
            if not any(starts[1:]) and limits[1:] == form.shape[1:]:
                taken = slice(starts[0], limits[0])
        if taken is None or not form.stacked:
            return None
        return [x._replace(held=jax.tree.map(lambda part: part[taken], form), fetched={})]

    def stack(self, x: Param) -> Param | None:
        form: Any = x.held
        return x if form.stacked else None

    def layer(self, x: Param) -> Param:
        return x


def _product_with_form(evaluator: Evaluator, eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """A product of matrices, of which one may be a form."""
    stored = [i for i, x in enumerate(operands) if is_param(x)]
    if len(stored) != 1:
        return bind(eqn, list(map(evaluator.full, operands)))
    (at,) = stored
    x: Param = operands[at]
    other = evaluator.full(operands[1 - at])

    def product(form: Any, other: jax.Array) -> jax.Array:
        def times(matrix: jax.Array) -> jax.Array:
            matrix = x.moved(matrix)
            (out,) = bind(eqn, [matrix, other] if at == 0 else [other, matrix])
            return out

        low = _low_rank(form, other, eqn, at)
        if low is None:
            return times(decoded(form))
        out = times(form.frozen()) + low
        if form.magnitude is None:
            return out
        others = range(form.columns, out.ndim) if at == 0 else range(out.ndim - form.columns)
        return out * jnp.expand_dims(form.factor(), tuple(others)).astype(out.dtype)

    # Within a checkpoint of the user's all is computed again, but for what its policy stores.
    run: Callable[..., Any] = product if x.in_layer else jax.checkpoint(product)
    return [run(x.held, other)]


def _low_rank(form: Any, other: jax.Array, eqn: Any, at: int) -> jax.Array | None:
    """A product with s A B, first with the side that it is over; None if not over one side."""
    contracted, batch = eqn.params["dimension_numbers"]
    if not isinstance(form, Adapted) or any(batch) or form.stacked:
        return None
    over = sorted(contracted[at])
    over_columns = over == list(range(form.rows, form.ndim))
    if not over_columns and over != list(range(form.rows)):
        return None
    if over_columns and (form.dropout or form.magnitude is not None):
        return None  # there is no input of A, and columns are summed
    other = form.dropped(other)
    first, second, own = form.a.astype(other.dtype), form.b.astype(other.dtype), contracted[at]
    if over_columns:
        first, second = jnp.moveaxis(second, 0, -1), jnp.moveaxis(first, -1, 0)
        own = tuple(d - form.rows for d in own)
    options = {k: eqn.params[k] for k in ("precision", "preferred_element_type")}
    narrow = jnp.tensordot(other, first, (contracted[1 - at], own), **options)  # (..., rank)
    low = form.scale * jnp.tensordot(narrow.astype(other.dtype), second, 1, **options)
    # What is not summed of the matrix comes first if that is the first operand, else last.
    kept = narrow.ndim - 1
    return low if at == 1 else jnp.moveaxis(low, range(kept), range(low.ndim - kept, low.ndim))
