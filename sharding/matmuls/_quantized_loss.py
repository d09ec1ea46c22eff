"""From a loss to the same loss, of which products with parameters are quantized."""

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from optax_ext.equations import trace
from optax_ext.traced_graph import ELEMENTWISE, bind
from sharding._types import Tree
from sharding.loss._evaluate import Evaluator, Param, is_param
from sharding.loss._loss_options import AnyLoss, Loss, Rewrite, as_loss
from sharding.matmuls._carried import ScaledParams
from sharding.matmuls._choice import MatmulOptions, MatmulUse, choose
from sharding.matmuls._product import PRODUCTS, quantized_product
from sharding.matmuls._recipes import RECIPES, Recipe
from sharding.placement._specs import check_patterns, leaf_names, plain_path

MIN_SIZE = 256  # of rows, terms and columns of a product
# What a parameter is after these is a parameter still, if all other operands are scalars.
_NAMES = "broadcast_in_dim copy dynamic_slice name reshape rev slice squeeze transpose"
_VIEWS = ELEMENTWISE | frozenset(_NAMES.split())


def quantized_matmuls(
    loss: AnyLoss,
    recipe: str | Recipe = "fp8",
    *,
    keep: str | Sequence[str] = (),
    min_size: int = MIN_SIZE,
    simulate: bool = False,
) -> Loss:
    """The same loss, whose products of activations and parameters have operands of few bits.

    These are the matrix products and convolutions of layers, forward and backward: in loops over
    stacked parameters, or with parameters whose paths number layers. Kept as they are: the last
    product outside of layers, which is the head, tables that are looked up, and products of
    attention. ``matmuls.report_products`` lists all of them. A function that returns no scalar is
    a layer itself, for the ``block`` of a ``Pipeline``.

    Args:
      loss: a function of ``(params, batch, ...)`` or a ``Loss``; it is not changed.
      recipe: ``"fp8"`` (scales by row; e4m3, cotangents e5m2) for GPUs from H100 on, ``"int8"``
        (scales by row, stochastic rounding of cotangents) for TPUs, or a ``Recipe``. With
        ``simulate`` also ``"mxfp8"``, ``"nvfp4"``, ``"ufp4"``, ``"luq"`` and ``"sun4"``. The last
        one, ``"fp8_delayed"`` and ``"int8_delayed"`` take ``matmuls.scaled_params``.
      keep: regular expressions of paths of parameters whose products stay as they are.
      min_size: the number of rows, terms and columns that a product has at least. Below it casts
        cost more than a faster product saves; so routers are kept.
      simulate: whether floats may stand for codes that no device multiplies here. Steps are slower.

    Returns:
      A ``Loss`` with the same options. If it takes a key, that is also the noise's; if not, noise
      depends on the cotangents' scales alone.

    Raises:
      ValueError: if there is no such recipe, it needs ``simulate``, the loss has one already, or,
        when it is called, an expression matches no parameter.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> def loss(params, x):
      ...     x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
      ...     return jnp.mean(x**2)
      >>> params = {"layers": jnp.ones((2, 64, 64)) / 64}
      >>> low = shd.quantized_matmuls(loss, "int8", min_size=64)
      >>> "i8[64,64]" in str(jax.make_jaxpr(low)(params, jnp.ones((64, 64))))
      True
    """
    inner = as_loss(loss, first=None)
    if quantized := getattr(inner.fn, "quantized", None):
        raise ValueError(
            f"the products of the loss are quantized already, by {quantized[1].recipe.name}. Give "
            "the plain loss, or its recipe once."
        )
    chosen = recipe if isinstance(recipe, Recipe) else RECIPES.get(recipe)
    if chosen is None:
        raise ValueError(
            f"recipe must be one of {', '.join(RECIPES)}, or a Recipe, got {recipe!r}."
        )
    if chosen.is_simulated and not simulate:
        raise ValueError(
            f"no device that programs are compiled for here multiplies in {chosen.name}. Its "
            f"arithmetic can be studied in floats: quantized_matmuls(loss, {chosen.name!r}, "
            "simulate=True) (docs: how_to/few_bit_matmuls)."
        )
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    check_patterns("keep", patterns)
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise ValueError(f"min_size must be an integer of at least 0, got {min_size!r}.")
    options = MatmulOptions(chosen, patterns, min_size)
    if rewrite := Rewrite.of(inner.fn):  # in tiles a product is in a function that runs as a whole
        low = _in_few_bits(dataclasses.replace(inner, fn=rewrite.plain), options)
        return dataclasses.replace(inner, fn=rewrite.again(low.fn))
    return _in_few_bits(inner, options)


def _in_few_bits(inner: Loss, options: MatmulOptions) -> Loss:
    """The same loss with these options of its products."""

    def fn(params: Tree, *args: Any) -> Any:
        seed = jnp.zeros((), jnp.uint32)
        if inner.rngs is True:
            seed = jax.random.bits(jax.random.fold_in(args[-1], 0x6D6D), dtype=jnp.uint32)
        out, state = trace_products(inner, options, params, args).run(seed, params)
        if state is not None:
            sys.modules["flax.nnx"].update(_without_scales(params), state)
        return out

    fn.quantized = inner, options  # type: ignore[attr-defined]
    with contextlib.suppress(TypeError, ValueError):  # where it is known, steps check it
        fn.__signature__ = inspect.signature(  # type: ignore[attr-defined]
            inner.fn, follow_wrapped=False
        )
    return dataclasses.replace(inner, fn=fn)


def made_by(loss: Loss, reader: str) -> tuple[Loss, MatmulOptions]:
    """What ``quantized_matmuls`` made a loss of, or an error of its ``reader`` if it did not."""
    made: Any = getattr(getattr(loss, "fn", None), "quantized", None)
    if made is None:
        raise ValueError(
            f"{reader} takes what shd.quantized_matmuls returned, got "
            f"{getattr(loss, '__name__', type(loss).__name__)}. Wrap such a loss by others later."
        )
    return made


class ScaledWeight(NamedTuple):
    """A parameter as it is held, and what is carried for its products, by fields of the recipe."""

    array: Any
    carried: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """How a parameter is read: as it is. Only what it becomes is followed."""

    in_layer: bool = False
    lengths: tuple[int, ...] = ()  # of the stacks that it is a slice of; 0 by its index
    looked_up: set[int] = dataclasses.field(default_factory=set, compare=False)

    by_use = False
    again = False

    def fetch(self, held: ScaledWeight) -> jax.Array:
        array: jax.Array = held.array
        return array

    def reduce(self, grad: jax.Array, tap: Any) -> jax.Array:
        raise AssertionError("a weight has no tap")

    def view(self, x: Param, eqn: Any, rest: list[Any]) -> list[Param] | None:
        name = eqn.primitive.name
        if name == "gather":
            self.looked_up.add(x.number)
        floats = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        if name not in _VIEWS or not floats or any(jnp.ndim(y) for y in rest):
            return None
        held: Any = x.held
        (array,) = bind(eqn, [held.array, *rest])
        carried = jax.tree.map(lambda c: _of_index(c, eqn, rest), held.carried)
        x = x.of_held(ScaledWeight(array, carried), None)  # type: ignore[arg-type]
        is_of_stack = name == "squeeze" and tuple(eqn.params["dimensions"]) == (0,)
        return [self.layer(self._slice(x, 0)) if is_of_stack else x]

    def stack(self, x: Param) -> Param | None:
        return self._slice(x, x.held[0].shape[0])

    def layer(self, x: Param) -> Param:
        return x._replace(rule=dataclasses.replace(x.rule, in_layer=True))

    def _slice(self, x: Param, length: int) -> Param:
        return x._replace(rule=dataclasses.replace(self, lengths=(*self.lengths, length)))


def _of_index(carried: jax.Array, eqn: Any, rest: list[Any]) -> jax.Array:
    """What is carried for a stack, of the layers that a view takes."""
    if carried.ndim == 1:
        return carried
    name, params = eqn.primitive.name, eqn.params
    if name == "slice":
        return lax.slice_in_dim(carried, params["start_indices"][0], params["limit_indices"][0])
    if name == "dynamic_slice":
        return lax.dynamic_slice_in_dim(carried, rest[0], params["slice_sizes"][0])
    return carried[0] if name == "squeeze" else carried


class TracedProducts(NamedTuple):
    """A traced loss, and what becomes of its products."""

    closed: ClosedJaxpr
    results: Any  # types, in a tree
    arrays: list[Any]  # of the parameters, then of the other arguments
    names: list[str]  # of the parameters
    uses: list[MatmulUse]  # in the order of the loss
    chosen: dict[tuple[int, int], Recipe | str]  # the recipe of each, or why it is kept

    def run(self, seed: jax.Array, params: Tree, first: bool = False) -> Any:
        """What the loss returns; ``first`` finds what ``params`` are to carry."""

        def product(use: MatmulUse, operands: list[Any], carried: Any) -> Any:
            recipe = self.chosen[use.key]
            if isinstance(recipe, str):
                return bind(use.eqn, operands)
            try:
                own = {field: carried[kind][field] for field, kind in recipe.carried.items()}
            except KeyError:
                raise ValueError(
                    f"{recipe.name} carries scales of the products of {self.names[use.number]} "
                    "beside the parameters: matmuls.scaled_params(loss, params, batch) makes both, "
                    "for the same options of the loss (docs: how_to/few_bit_matmuls)."
                ) from None
            return [quantized_product(use.eqn, recipe, use.at, operands, seed, own, first)]

        scaled = params if isinstance(params, ScaledParams) else ScaledParams(params, {}, {})
        carried = [
            {"pact": scaled.pact.get(name, {}), "delayed": scaled.delayed.get(name, {})}
            for name in self.names
        ]
        held, rest = map(ScaledWeight, self.arrays, carried), self.arrays[len(self.names) :]
        outs = _evaluated(self.closed, list(held), rest, product, WeightRule())
        return jax.tree.unflatten(jax.tree.structure(self.results), outs)


def trace_products(
    loss: Loss, options: MatmulOptions, params: Tree, args: Sequence[Any]
) -> TracedProducts:
    """Traces a loss, and decides about each of its products."""
    params = _without_scales(params)
    leaves, treedef = jax.tree.flatten(params)
    rest, rest_treedef = jax.tree.flatten(args)
    own = [i for i, x in enumerate(leaves) if hasattr(x, "dtype")]  # modules have functions, too

    def flat(*values: Any) -> Any:
        full = dict(enumerate(leaves)) | dict(zip(own, values, strict=False))
        tree = treedef.unflatten(full.values())
        return loss(tree, *rest_treedef.unflatten(values[len(own) :])), _changed(tree)

    arrays = [*(leaves[i] for i in own), *rest]
    closed, results = trace(flat, *arrays)
    every = list(map(plain_path, leaf_names(params)))
    names = [every[i] for i in own]
    uses: dict[tuple[int, int], MatmulUse] = {}
    is_loss = any(x.shape == () for x in jax.tree.leaves(results[0]))
    rule = WeightRule(in_layer=not is_loss)

    def note(use: MatmulUse, operands: list[Any], carried: Any) -> Any:
        uses.setdefault(use.key, use)
        return bind(use.eqn, operands)

    def abstract(*values: Any) -> Any:
        held = [ScaledWeight(x, {}) for x in values[: len(own)]]
        return _evaluated(closed, held, values[len(own) :], note, rule)

    jax.eval_shape(abstract, *arrays)
    found = list(uses.values())
    chosen = choose(found, names, options, rule.looked_up)
    return TracedProducts(closed, results, arrays, names, found, chosen)


def _without_scales(params: Tree) -> Tree:
    return params.params if isinstance(params, ScaledParams) else params


def _changed(tree: Tree) -> Any:
    """What a loss may have changed in place: an nnx model's variables but parameters, or None."""
    nnx: Any = sys.modules.get("flax.nnx")
    is_model = nnx is not None and isinstance(tree, nnx.Module)
    return nnx.state(tree, nnx.Not(nnx.Param)) if is_model else None


def _evaluated(
    closed: ClosedJaxpr,
    weights: Sequence[ScaledWeight],
    rest: Sequence[Any],
    product: Callable[[MatmulUse, list[Any], Any], Any],
    rule: WeightRule,
) -> list[Any]:
    """What a traced loss returns, with its own products; ``rule`` is that of its parameters."""

    def equation(evaluator: Evaluator, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        params = [(i, x) for i, x in enumerate(operands) if is_param(x)]
        use, carried = MatmulUse(eqn, -1, -1, False), {}
        if len(params) == 1:
            at, x = params[0]
            carried, lengths = x.held.carried, x.rule.lengths
            stacks = weights[x.number].array.shape[: len(lengths)]
            is_whole = all(n in (0, size) for n, size in zip(lengths, stacks, strict=True))
            of_param = x.number, x.rule.in_layer, x.is_shared
            use = MatmulUse(eqn, at, *of_param, stacks if is_whole else None)
        made: Sequence[Any] = product(use, list(map(evaluator.full, operands)), carried)
        return made

    evaluator = Evaluator(equations=dict.fromkeys(PRODUCTS, equation))
    of_rule: Any = Param  # which holds what its rule takes
    held = [of_rule(i, rule, x, None, {}) for i, x in enumerate(weights)]
    return evaluator(closed, [*held, *rest])
