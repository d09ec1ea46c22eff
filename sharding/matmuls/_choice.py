"""Which products of a loss are quantized, and why the others are not."""

import re
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from sharding.loss._stack import numbered_layers
from sharding.matmuls._product import sizes_of
from sharding.matmuls._recipes import Recipe

HEAD = "the head: the last product outside of layers"
OUTSIDE = "outside of layers"
# Terms of a sum in int32 that cannot overflow.
_MAX_TERMS = (2**31 - 1) // 127**2


class MatmulOptions(NamedTuple):
    """What ``quantized_matmuls`` was given."""

    recipe: Recipe
    keep: tuple[str, ...]
    min_size: int


class MatmulUse(NamedTuple):
    """A product of a loss, and the parameter that it reads."""

    eqn: Any
    at: int  # the operand that is the parameter; -1 if none or both are
    number: int  # of the parameter, or -1
    in_layer: bool  # of a stack, in a loop or by its index
    is_shared: bool = False  # whether other equations read the parameter, too
    stacks: tuple[int, ...] | None = None  # its leading dims that layers are slices of, if known

    @property
    def key(self) -> tuple[int, int]:
        return id(self.eqn), self.number


def choose(
    uses: list[MatmulUse], names: list[str], options: MatmulOptions, looked_up: set[int]
) -> dict[tuple[int, int], Recipe | str]:
    """By the keys of products, the recipe, or why one is kept.

    Raises:
      ValueError: if an expression of ``keep`` matches no parameter.
    """
    for pattern in options.keep:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"keep: {pattern!r} matches no parameter; there are {', '.join(names[:8])}"
                f"{' ...' if len(names) > 8 else ''}."
            )
    layers = numbered_layers(names)
    # Modules are numbered, too, where the last one is the head.
    last = next((use for use in reversed(uses) if use.at >= 0 and not use.in_layer), None)
    chosen: dict[tuple[int, int], Recipe | str] = {}
    stacks: dict[int, set[Any]] = {}
    for use in uses:
        stacks.setdefault(use.number, set()).add(use.stacks)
    for use in uses:
        reason = _reason(use, names, options, looked_up)
        at_an_end = use is last or not (use.in_layer or layers[use.number])
        recipe = options.recipe.ends if at_an_end else options.recipe
        if not reason and recipe and recipe.carried and not _is_one(stacks[use.number]):
            reason = "scales are carried by layers, and it is read otherwise, too"
        chosen[use.key] = reason or recipe or (HEAD if use is last else OUTSIDE)
    return chosen


def _is_one(stacks: set[tuple[int, ...] | None]) -> bool:
    return len(stacks) == 1 and None not in stacks


def _reason(use: MatmulUse, names: list[str], options: MatmulOptions, looked_up: set[int]) -> str:
    """Why a product is not quantized, wherever it is; empty if there is no reason."""
    if use.at < 0:
        return "not between an activation and a parameter"
    pattern = next((x for x in options.keep if re.search(x, names[use.number])), None)
    if pattern is not None:
        return f"keep={pattern!r}"
    if use.number in looked_up:
        return "rows of its table are looked up"
    dtypes = [v.aval.dtype for v in (*use.eqn.invars, *use.eqn.outvars)]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return "not of floating numbers"
    if use.eqn.primitive is lax.conv_general_dilated_p and use.at == 0:
        return "a convolution of a parameter"
    sizes = sizes_of(use.eqn, use.at)
    if min(sizes) < options.min_size:
        return f"{' x '.join(map(str, sizes))}: a size is below {options.min_size}"
    of_int8 = any(q.grid is not None and q.grid.dtype == jnp.int8 for q in options.recipe[1:5])
    if of_int8 and max(sizes) > _MAX_TERMS:
        return f"a sum of {max(sizes)} terms may overflow int32"
    return ""
