"""Which products of a loss run in which bits, which do not, and why."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from optax_ext.equations import Scan, inner_jaxprs, record_of
from optax_ext.user_line import line_of
from sharding._jaxprs import product_flops
from sharding._types import Tree
from sharding.loss._loss_options import Loss
from sharding.loss._rows import plain_type
from sharding.matmuls._product import dims_of, gathers_codes
from sharding.matmuls._quantized_loss import TracedProducts, made_by, trace_products
from sharding.matmuls._recipes import Recipe


class MatmulRow(NamedTuple):
    """One product of a loss."""

    parameter: str  #: its path; empty if there is none
    formats: str  #: of activation, weight and cotangents; empty if it is kept
    reason: str  #: why it is kept; empty if it is not
    share: float  #: of the FLOPs of all products of the loss
    line: str  #: of the user's code, as ``file:number``


class MatmulReport(NamedTuple):
    """The products of a loss, in its order; printed, a table."""

    rows: tuple[MatmulRow, ...]  #: one for each
    #: what stage 3 gathers in codes: paths of parameters that one quantized product alone reads,
    #: and the dims, from the last one, along which elements share a scale
    coded: dict[str, tuple[int, ...]]

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


def report_products(loss: Loss, params: Tree, *args: Any) -> MatmulReport:
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
      >>> found = matmuls.report_products(shd.quantized_matmuls(loss), params, jnp.ones((256, 256)))
      >>> found.share, [row.reason for row in found.rows]
      (0.75, ['', 'the head: the last product outside of layers'])
    """
    made = made_by(loss, "report")
    # Of global shapes, whatever axes arrays are sharded over.
    params, args = jax.tree.map(
        lambda x: plain_type(x) if hasattr(x, "dtype") else x, (params, args)
    )
    traced = trace_products(*made, params, args)
    products = list(_products_in(traced.closed.jaxpr))
    flops: Counter[int] = Counter()  # by the id of an equation
    for eqn, of_runs in products:
        flops[id(eqn)] += of_runs
    total = sum(flops.values()) or 1
    readers = Counter(id(use.eqn) for use in traced.uses)
    rows = []
    for use in traced.uses:
        chosen = traced.chosen[use.key]
        both = ("", chosen) if isinstance(chosen, str) else (_formats(chosen), "")
        name = traced.names[use.number] if use.number >= 0 else ""
        share = flops[id(use.eqn)] / total / readers[id(use.eqn)]
        rows.append(MatmulRow(name, *both, share, line_of(use.eqn.source_info)))
    for eqn in {id(eqn): eqn for eqn, _ in products if id(eqn) not in readers}.values():
        reason, line = "in a function that is run as a whole", line_of(eqn.source_info)
        rows.append(MatmulRow("", "", reason, flops[id(eqn)] / total, line))
    return MatmulReport(tuple(rows), _coded(traced))


def _coded(traced: TracedProducts) -> dict[str, tuple[int, ...]]:
    """Parameters that are gathered in codes, and the dims that a scale is of."""
    number_of_uses = Counter(use.number for use in traced.uses)
    found = {}
    for use in traced.uses:
        recipe = traced.chosen[use.key]
        alone = number_of_uses[use.number] == 1 and not use.is_shared
        if alone and isinstance(recipe, Recipe) and gathers_codes(recipe):
            kept = dims_of(use.eqn).kept[use.at]
            ndim = use.eqn.invars[use.at].aval.ndim
            summed = recipe.weight.summed_dims(ndim, kept)
            found[traced.names[use.number]] = tuple(d - ndim for d in summed)
    return found


def _formats(recipe: Recipe) -> str:
    names = [q.grid.name if q.grid else "as it is" for q in recipe[1:5]]
    return " x ".join(dict.fromkeys(names)) + " (simulated)" * recipe.is_simulated


def _products_in(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Products, in loops, too, each with the FLOPs of all its runs."""
    for eqn in jaxpr.eqns:
        operands, results = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
        if flops := product_flops(eqn, operands, results):
            yield eqn, times * flops
        record = record_of(eqn)
        runs = record.options["length"] if isinstance(record, Scan) else 1
        for inner in inner_jaxprs(eqn):
            yield from _products_in(inner, times * runs)
