"""From a loss to the same loss, of which products with parameters are quantized."""

import dataclasses
import re
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
from sharding.loss._loss_options import AnyLoss, Loss, as_loss
from sharding.loss._stack import numbered_layers
from sharding.matmuls._product import PRODUCTS, quantized_product, sizes_of
from sharding.matmuls._recipes import RECIPES, Recipe
from sharding.placement._specs import check_patterns, leaf_names, plain_path

# What a parameter is after these is a parameter still, if all other operands are scalars.
_VIEWS = ELEMENTWISE | frozenset(
    "broadcast_in_dim copy dynamic_slice name reshape rev slice squeeze transpose".split()
)
# Terms of a sum in int32 that cannot overflow.
_MAX_TERMS = (2**31 - 1) // 127**2


def quantized_matmuls(
    loss: AnyLoss,
    recipe: str | Recipe = "fp8",
    *,
    keep: str | Sequence[str] = (),
    min_size: int = 256,
    simulate: bool = False,
) -> Loss:
    """The same loss, whose products of activations and parameters have operands of few bits.

    These are the matrix products and convolutions of layers, forward and backward: in loops over
    stacked parameters, or with parameters whose paths number layers. Kept as they are: the last
    product outside of loops, which is the head, tables that are looked up, and products of
    attention. ``matmuls.report`` lists all of them.

    Args:
      loss: a function of ``(params, batch, ...)`` or a ``Loss``; it is not changed.
      recipe: ``"fp8"`` (scales by row; e4m3, cotangents e5m2) for GPUs from H100 on, ``"int8"``
        (scales by row, stochastic rounding of cotangents) for TPUs, or a ``Recipe``. With
        ``simulate`` also ``"mxfp8"``, ``"nvfp4"``, ``"ufp4"``, ``"luq"`` and ``"sun4"``.
      keep: regular expressions of paths of parameters whose products stay as they are.
      min_size: the number of rows, terms and columns that a product has at least. Below it casts
        cost more than a faster product saves; so routers are kept.
      simulate: whether floats may stand for codes that no device multiplies here. Steps are slower.

    Returns:
      A ``Loss`` with the same options. If it takes a key, that is also the noise's; if not, noise
      depends on the cotangents' scales alone.

    Raises:
      ValueError: if there is no such recipe, it needs ``simulate``, or, when the loss is called, an
        expression matches no parameter.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> def loss(params, x):
      ...     x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
      ...     return jnp.mean(x**2)
      >>> params = {"layers": jnp.ones((2, 64, 64)) / 64}
      >>> low = shd.quantized_matmuls(loss, "int8", min_size=64)
      >>> gradient = jax.grad(low)(params, jnp.ones((64, 64)))
      >>> str(jax.make_jaxpr(low)(params, jnp.ones((64, 64)))).count("i8[64,64]") > 0
      True
    """
    inner, chosen = as_loss(loss), _recipe(recipe, simulate)
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    check_patterns("keep", patterns)
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise ValueError(f"min_size must be an integer of at least 0, got {min_size!r}.")
    options = MatmulOptions(chosen, patterns, min_size)

    def fn(params: Tree, *args: Any) -> Any:
        traced = trace_products(inner, options, params, args)
        return traced.run(_seed(inner, args))

    fn.quantized = inner, options  # type: ignore[attr-defined]
    return dataclasses.replace(inner, fn=fn)


def _recipe(given: str | Recipe, simulate: bool) -> Recipe:
    found = given if isinstance(given, Recipe) else RECIPES.get(given)
    if found is None:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, or a Recipe, got {given!r}.")
    if found.is_simulated and not simulate:
        raise ValueError(
            f"no device that programs are compiled for here multiplies in {found.name}. Its "
            f"arithmetic can be studied in floats: quantized_matmuls(loss, {found.name!r}, "
            "simulate=True)."
        )
    return found


def _seed(loss: Loss, args: Sequence[Any]) -> jax.Array:
    """Of the noise: from the key that the loss takes, if that is one key."""
    if loss.rngs is not True:
        return jnp.zeros((), jnp.uint32)
    return jax.random.bits(jax.random.fold_in(args[-1], 0x6D6D), dtype=jnp.uint32)


class MatmulOptions(NamedTuple):
    """What ``quantized_matmuls`` was given."""

    recipe: Recipe
    keep: tuple[str, ...]
    min_size: int


class MatmulUse(NamedTuple):
    """A product of a loss, and a parameter that it reads."""

    eqn: Any
    at: int  # the operand that is the parameter; -1 if none or both are
    number: int  # of the parameter
    in_layer: bool  # of a stack, in a loop or by its index


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """How a parameter is read: as it is. Only what it becomes is followed."""

    in_layer: bool = False
    looked_up: set[int] = dataclasses.field(default_factory=set, compare=False)

    by_use = False
    again = False

    def fetch(self, held: jax.Array) -> jax.Array:
        return held

    def reduce(self, grad: jax.Array, tap: Any) -> jax.Array:
        raise AssertionError("a weight has no tap")

    def view(self, x: Param, eqn: Any, rest: list[Any]) -> list[Param] | None:
        name = eqn.primitive.name
        if name == "gather":
            self.looked_up.add(x.number)
        floats = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        scalars = all(jnp.ndim(y) == 0 for y in rest)
        if name not in _VIEWS or not (floats and scalars) or len(eqn.outvars) > 1:
            return None
        x = x.of_held(bind(eqn, [x.held, *rest])[0], None)
        is_of_stack = name == "squeeze" and tuple(eqn.params["dimensions"]) == (0,)
        return [self.layer(x) if is_of_stack else x]

    def stack(self, x: Param) -> Param | None:
        return x if x.held.ndim else None

    def layer(self, x: Param) -> Param:
        return x._replace(rule=dataclasses.replace(self, in_layer=True))


class TracedProducts(NamedTuple):
    """A traced loss, and what becomes of its products."""

    closed: ClosedJaxpr
    results: Any  # types, in a tree
    leaves: list[Any]  # of the parameters, then of the other arguments
    num_params: int
    names: list[str]  # of the parameters
    uses: list[MatmulUse]  # in the order of the loss
    kept: dict[tuple[int, int], str]  # by equation and parameter, why it is kept
    recipe: Recipe

    def recipe_of(self, use: MatmulUse) -> Recipe | None:
        """What a product is quantized by."""
        reason = self.kept.get(_key(use))
        at_an_end = reason in (_HEAD, _OUTSIDE)
        return self.recipe if reason is None else self.recipe.ends if at_an_end else None

    def run(self, seed: jax.Array) -> Any:
        recipes = {_key(use): self.recipe_of(use) for use in self.uses}

        def product(use: MatmulUse, operands: list[Any]) -> Any:
            recipe = recipes.get(_key(use))
            if recipe is None:
                return bind(use.eqn, operands)
            return [quantized_product(use.eqn, recipe, use.at, operands, seed)]

        outs, _ = _evaluated(self.closed, self.leaves, self.num_params, product)
        return jax.tree.unflatten(jax.tree.structure(self.results), outs)


def trace_products(
    loss: Loss, options: MatmulOptions, params: Tree, args: Sequence[Any]
) -> TracedProducts:
    """Traces a loss, and decides about each of its products."""
    leaves, treedef = jax.tree.flatten(params)
    rest, rest_treedef = jax.tree.flatten(args)
    arrays = [i for i, x in enumerate(leaves) if hasattr(x, "dtype")]  # modules have functions, too

    def flat(*values: Any) -> Any:
        own, others = values[: len(arrays)], values[len(arrays) :]
        full = list(leaves)
        for i, x in zip(arrays, own, strict=True):
            full[i] = x
        return loss(treedef.unflatten(full), *rest_treedef.unflatten(others))

    given = [*(leaves[i] for i in arrays), *rest]
    closed, results = trace(flat, *given)
    names = list(map(plain_path, leaf_names(params)))
    names = [names[i] for i in arrays]
    uses: dict[tuple[int, int], MatmulUse] = {}

    def note(use: MatmulUse, operands: list[Any]) -> Any:
        uses.setdefault(_key(use), use)
        return bind(use.eqn, operands)

    looked_up: set[int] = set()

    def abstract(*values: Any) -> Any:
        outs, found = _evaluated(closed, values, len(arrays), note)
        looked_up.update(found)
        return outs

    jax.eval_shape(abstract, *given)
    every = list(uses.values())
    kept = _kept(every, names, options, looked_up)
    return TracedProducts(closed, results, given, len(arrays), names, every, kept, options.recipe)


def _key(use: MatmulUse) -> tuple[int, int]:
    return id(use.eqn), use.number


def _evaluated(
    closed: ClosedJaxpr,
    leaves: Sequence[Any],
    num_params: int,
    product: Callable[[MatmulUse, list[Any]], Any],
) -> tuple[list[Any], set[int]]:
    """What a traced loss returns, with its own products; the parameters that are looked up."""
    rule = WeightRule()

    def equation(evaluator: Evaluator, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        weights = [i for i, x in enumerate(operands) if is_param(x)]
        arrays = list(map(evaluator.full, operands))
        at = weights[0] if len(weights) == 1 else -1
        weight = operands[at] if at >= 0 else None
        number, in_layer = (weight.number, weight.rule.in_layer) if weight else (-1, False)
        made: Sequence[Any] = product(MatmulUse(eqn, at, number, in_layer), arrays)
        return made

    evaluator = Evaluator(equations=dict.fromkeys(PRODUCTS, equation))
    held = [Param(i, rule, x, None, {}) for i, x in enumerate(leaves[:num_params])]
    return evaluator(closed, [*held, *leaves[num_params:]]), rule.looked_up


# --- Which products -------------------------------------------------------------------------------

_HEAD = "the head: the last product outside of loops"
_OUTSIDE = "outside of layers"


def _kept(
    uses: list[MatmulUse], names: list[str], options: MatmulOptions, looked_up: set[int]
) -> dict[tuple[int, int], str]:
    """Why products are kept as they are; the others are quantized."""
    for pattern in options.keep:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"keep: {pattern!r} matches no parameter; there are {', '.join(names[:8])}"
                f"{' ...' if len(names) > 8 else ''}."
            )
    layers = numbered_layers(names)
    last = next((use for use in reversed(uses) if use.at >= 0 and not use.in_layer), None)
    found = {}
    for use in uses:
        reason = _of_operands(use) or _of_parameter(use, names, options.keep, looked_up)
        reason = reason or _of_sizes(use, options)
        if not reason and use is last:
            reason = _HEAD
        if not reason and not use.in_layer and not layers[use.number]:
            reason = _OUTSIDE
        if reason:
            found[_key(use)] = reason
    return found


def _of_operands(use: MatmulUse) -> str:
    if use.at < 0:
        return "not between an activation and a parameter"
    dtypes = [v.aval.dtype for v in (*use.eqn.invars, *use.eqn.outvars)]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return f"of {', '.join(sorted({str(dtype) for dtype in dtypes}))}"
    if use.eqn.primitive is lax.conv_general_dilated_p and use.at == 0:
        return "a convolution of a parameter"
    return ""


def _of_parameter(
    use: MatmulUse, names: list[str], keep: tuple[str, ...], looked_up: set[int]
) -> str:
    name = names[use.number]
    pattern = next((pattern for pattern in keep if re.search(pattern, name)), None)
    if pattern is not None:
        return f"keep={pattern!r}"
    return "rows of its table are looked up" if use.number in looked_up else ""


def _of_sizes(use: MatmulUse, options: MatmulOptions) -> str:
    sizes = sizes_of(use.eqn, use.at)
    if min(sizes) < options.min_size:
        return f"{' x '.join(map(str, sizes))}: a size is below {options.min_size}"
    grids = [q.grid.name for q in options.recipe[1:5] if q.grid and not options.recipe.is_simulated]
    if "int8" in grids and max(sizes) > _MAX_TERMS:
        return f"{max(sizes)} terms may overflow int32"
    return ""
