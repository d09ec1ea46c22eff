"""Which products of a loss run in which bits, which do not, and why."""

from collections import Counter
from typing import Any, NamedTuple

import jax

from optax_ext.equations import Scan, inner_jaxprs, record_of
from optax_ext.user_line import line_of
from sharding._types import Tree
from sharding.loss._loss_options import Loss
from sharding.matmuls._product import PRODUCTS, bits_of, flops_of
from sharding.matmuls._transformation import MatmulUse, TracedProducts, trace_products


class MatmulRow(NamedTuple):
    """One product of a loss."""

    parameter: str  #: its path; empty if there is none
    formats: str  #: of activation, weight and cotangents; empty if it is kept
    reason: str  #: why it is kept; empty if it is not
    share: float  #: of the FLOPs of all products of the loss
    line: str  #: of the user's code, as ``file:number``


class MatmulReport(NamedTuple):
    """The products of a loss, in its order.

    Printed, it is a table.
    """

    rows: tuple[MatmulRow, ...]

    @property
    def share(self) -> float:
        """The share of the FLOPs of all products that is quantized."""
        return sum(row.share for row in self.rows if row.formats)

    def __str__(self) -> str:
        lines = [f"{self.share:.1%} of the FLOPs of products are quantized."]
        for row in self.rows:
            what = row.formats or f"kept: {row.reason}"
            lines.append(f"{row.share:6.1%}  {row.parameter or '-'}  {what}  {row.line}".rstrip())
        return "\n".join(lines)


def report(loss: Loss, params: Tree, *args: Any) -> MatmulReport:
    """Which products of a loss are quantized, in which formats, and why others are not.

    The loss is traced, not run.

    Args:
      loss: what ``quantized_matmuls`` returned.
      params: arrays or their types.
      args: what else the loss takes: a batch, a key.

    Raises:
      ValueError: if the loss is none of ``quantized_matmuls``.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> from sharding import matmuls
      >>> def loss(params, x):
      ...     x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
      ...     return jnp.mean(x @ params["head"])
      >>> params = {"layers": jnp.ones((3, 256, 256)), "head": jnp.ones((256, 256))}
      >>> found = matmuls.report(shd.quantized_matmuls(loss), params, jnp.ones((256, 256)))
      >>> found.share, [row.reason for row in found.rows]
      (0.75, ['', 'the head: the last product outside of loops'])
    """
    made = getattr(getattr(loss, "fn", None), "quantized", None)
    if made is None:
        raise ValueError(
            "report takes what shd.quantized_matmuls returned, got "
            f"{getattr(loss, '__name__', type(loss).__name__)}. Wrap such a loss by others later."
        )
    inner, options = made
    found: list[TracedProducts] = []

    def of_types(params: Tree, *args: Any) -> None:
        found.append(trace_products(inner, options, params, args))

    jax.eval_shape(of_types, params, *args)
    return MatmulReport(_rows(found[0]))


def _rows(traced: TracedProducts) -> tuple[MatmulRow, ...]:
    flops: Counter[int] = Counter()
    equations: dict[int, Any] = {}
    _add_flops(traced.closed.jaxpr, 1, flops, equations)
    total = sum(flops.values()) or 1.0
    readers = Counter(id(use.eqn) for use in traced.uses)
    rows = []
    for use in traced.uses:
        at = id(use.eqn)
        reason, formats = _words(traced, use)
        name = traced.names[use.number] if use.number >= 0 else ""
        line = line_of(use.eqn.source_info)
        rows.append(MatmulRow(name, formats, reason, flops[at] / total / readers[at], line))
    for at in flops.keys() - readers.keys():
        reason = "in a function that is run as a whole"
        line = line_of(equations[at].source_info)
        rows.append(MatmulRow("", "", reason, flops[at] / total, line))
    return tuple(rows)


def _words(traced: TracedProducts, use: MatmulUse) -> tuple[str, str]:
    """Why a product is kept, or its formats."""
    recipe = traced.recipe_of(use)
    if recipe is None:
        return traced.kept[id(use.eqn), use.number], ""
    words = list(dict.fromkeys(map(bits_of, recipe[1:5])))
    return "", " x ".join(words) + (" (simulated)" if recipe.is_simulated else "")


def _add_flops(jaxpr: Any, times: int, flops: Counter[int], equations: dict[int, Any]) -> None:
    for eqn in jaxpr.eqns:
        if eqn.primitive in PRODUCTS:
            flops[id(eqn)] += times * flops_of(eqn)  # type: ignore[assignment]
            equations[id(eqn)] = eqn
        record = record_of(eqn)
        runs = record.options["length"] if isinstance(record, Scan) else 1
        for inner in inner_jaxprs(eqn):
            _add_flops(inner, times * runs, flops, equations)
