"""The factoring rule for Flax transformers, the table of a rule's result, and the decay mask."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import optax

from optax_ext import _validate
from optax_ext._factoring_rules import Dims, Factoring, FactoringRule, check_rule, factorings
from optax_ext._leaves import Leaves, at_least_float32
from optax_ext._text_table import aligned

# Paths that may be of stacked layers in Flax: "layers", "blocks" or the name of a scan; not lists
# or numbered modules, whose layers are separate arrays ("layers/0", "layers_0").
STACKED = r"(^|/)(layers|blocks|\w*[sS]can\w*)/(?!\d+(/|$))"

_ROWS, _COLS = Factoring((-3,), (-2, -1)), Factoring((-3, -2), (-1,))
# For the arrays of one layer: a pattern of the path, the minimum rank, and the factoring.
_ATTENTION: tuple[tuple[str, int, Factoring], ...] = (
    # (embed, heads, head_dim)
    (r"(query|key|value|[qkv]_proj)/kernel$", 3, _ROWS),
    # (heads, head_dim, embed)
    (r"(out|o_proj|out_proj)/kernel$", 3, _COLS),
    (r"attn_vec_einsum/(kernel|w)$", 3, _COLS),
    # (embed, 3, heads, head_dim): three matrices
    (r"(qkv|kv|qkv_proj|kv_proj)/kernel$", 4, Factoring((-4,), (-2, -1), (-3,))),
    # (3, heads, embed, head_dim)
    (r"(qkv|kv)_einsum/(kernel|w)$", 4, Factoring((-2,), (-3, -1), (-4,))),
    # (heads, embed, head_dim)
    (r"q_einsum/(kernel|w)$", 3, Factoring((-2,), (-3, -1))),
)
# Names of a parameter, or of a module around it, that is not of a hidden layer: embeddings (embed,
# shared_embedding, embed_tokens, Embed_0, pos_embedding, unembed), positions and output heads.
# "heads", "out" and "output" are of attention and of hidden layers.
NOT_HIDDEN = (
    r"(^|/)(\w*[eE]mb(ed(der|dings?)?)?s?(_(\d+|tokens|positions|table))?"
    r"|wte|wpe|pos|positions?|((lm|mlp|output|classifier)_)?head|logits?_?(dense|proj)?"
    r"|classifier|readout)(_?\d+)?(/|$)"
)
_VECTOR = r"(^|/)(bias|scale|\w*norm\w*|\w*norm\w*/(?!kernel$|embedding$)\w+)$"
_MATRIX = r"(^|/)(kernel|embedding)$"


@dataclasses.dataclass(frozen=True)
class flax_transformer:
    """The rule for Flax transformers: embeddings, heads, attention, stacked and unstacked layers.

    The first of these that applies to a parameter's path and rank:

    - ``bias``, ``scale`` and the parameters of norms are vectors and are not factored.
    - Attention kernels (``query``, ``key``, ``value``, ``out``) are one matrix, with heads and
      head_dim together on one side; fused ones (``qkv``, ``qkv_einsum``, ``kv_einsum``) are one
      matrix for each of query, key and value.
    - The last two dims of other arrays are rows and columns; dims before them stack matrices that
      share a clip, as in ``last_two_dims``.

    Stacked layers (``nn.scan``) have one more dim, along which every layer has its own statistics,
    clip and scale: a (layers, n) bias is one vector per layer, never a matrix. By default a module
    of the name ``layers``, ``blocks`` or of a scan is a stack if all arrays in it have an extra dim
    of one size. Optimizers and ``describe_factoring`` look at all of them; ``resolve`` sees one,
    and needs ``stacked``. So do trees that leave it open, such as attention kernels alone.

    Attributes:
      stacked: a pattern of the paths of stacked layers; None if there are none. Kernels and
        embeddings without an extra dim are not stacked, whatever their path.
      stack_dim: the dim of layers in their arrays, counted from the front; MaxText uses 1.

    Raises:
      ValueError: if ``stacked`` is not a regular expression, or ``stack_dim`` is negative; where
        the rule is used: if shapes do not tell whether layers are stacked.

    Example:
      >>> from optax_ext import flax_transformer
      >>> rule = flax_transformer(stacked="^layers/")
      >>> rule.resolve("embed/embedding", (32000, 4096))
      Factoring(rows=(0,), cols=(1,), batch=())
      >>> rule.resolve("layers/attn/query/kernel", (32, 4096, 32, 128))
      Factoring(rows=(1,), cols=(2, 3), batch=(0,))
      >>> rule.resolve("layers/mlp/bias", (32, 4096))
      Factoring(rows=(), cols=(), batch=(0,))
    """

    stacked: str | None = STACKED
    stack_dim: int = 0

    def __post_init__(self) -> None:
        """Raises unless the fields make sense."""
        _validate.pattern("stacked", self.stacked or "")
        if isinstance(self.stack_dim, bool) or not self.stack_dim >= 0:
            raise ValueError(f"stack_dim must not be negative, got {self.stack_dim!r}.")

    def resolve(self, path: str, shape: Dims) -> Factoring | None:
        """Returns the factoring of one parameter."""
        ndim = len(shape)
        stacked = bool(self.stacked and re.search(self.stacked, path))
        if stacked and self.stacked == STACKED:
            raise ValueError(
                f"flax_transformer: whether {path!r} of shape {shape} is of stacked layers depends "
                "on the other parameters. Write flax_transformer(stacked=r'^layers/'), with your "
                "pattern, or stacked=None; for_tree chooses by the paths and shapes of all."
            )
        stacked = stacked and self.stack_dim < ndim and ndim > max(_ranks(path)[0], 1)
        free = [d for d in range(ndim) if not (stacked and d == self.stack_dim)]
        found = _of_one_layer(path, len(free))
        rows, cols, batch = (
            tuple(sorted(free[d] for d in dims)) for dims in (found.rows, found.cols, found.batch)
        )
        return Factoring(rows, cols, (*batch, self.stack_dim) if stacked else batch).resolve(
            path, shape
        )

    def for_tree(self, parameters: Sequence[tuple[str, Dims]]) -> "flax_transformer":
        """Returns the rule for a tree of parameters with these paths and shapes."""
        if self.stacked != STACKED:
            return self
        groups: dict[str, list[tuple[str, Dims]]] = {}
        for path, shape in parameters:
            for match in re.finditer(f"(?=({STACKED}))", path):
                groups.setdefault(path[: match.end(1)], []).append((path, shape))
        found: list[str] = []
        for prefix in sorted(groups, key=len):
            if not prefix.startswith(tuple(found)) and self._is_stack(prefix, groups[prefix]):
                found.append(prefix)
        pattern = "|".join(map(re.escape, found))
        return dataclasses.replace(self, stacked=f"^({pattern})" if found else None)

    def _is_stack(self, prefix: str, arrays: Sequence[tuple[str, Dims]]) -> bool:
        """Whether the arrays under a prefix have an extra dim of one size; raises if it is open."""
        dim = self.stack_dim
        sizes = {shape[dim : dim + 1] for _, shape in arrays}
        ranks = [(len(shape), *_ranks(path)) for path, shape in arrays]
        if len(sizes) > 1 or () in sizes or any(ndim <= least for ndim, least, _ in ranks):
            return False
        if any(ndim > most for ndim, _, most in ranks):
            return True
        if any(ndim == 1 for ndim, *_ in ranks):  # a vector of one layer
            return False
        path, shape = arrays[0]
        raise ValueError(
            f"flax_transformer: by their shapes the arrays under {prefix!r} may be of stacked "
            f"layers or of one, such as {path!r} of shape {shape}. If dim {dim} is of layers, "
            f"write flax_transformer(stacked={'^' + prefix!r}, stack_dim={dim}), else stacked=None."
        )


def _ranks(path: str) -> tuple[int, int]:
    """The fewest and the most dims that a parameter of this name has in one layer."""
    if re.search(_VECTOR, path):
        return 1, 2 if path.endswith("bias") else 1  # (heads, head_dim)
    for pattern, rank, _ in _ATTENTION:
        if re.search(rf"(^|/){pattern}", path):
            return rank if "einsum" in pattern else 2, rank
    return 2 if re.search(_MATRIX, path) else 0, 2


def _of_one_layer(path: str, ndim: int) -> Factoring:
    """Returns the factoring of an unstacked parameter; dims count from the end."""
    if ndim < 2 or re.search(_VECTOR, path):
        return Factoring()
    for pattern, rank, factoring in _ATTENTION:
        if ndim >= rank and re.search(rf"(^|/){pattern}", path):
            return factoring
    return Factoring((-2,), (-1,))


@dataclasses.dataclass(frozen=True)
class FactoringRow:
    """One parameter of a ``FactoringTable``.

    Attributes:
      path: its keys joined by ``/``.
      shape: its shape.
      factoring: which of its dims are factored.
      nbytes: bytes of its second moment.
    """

    path: str
    shape: tuple[int, ...]
    factoring: Factoring
    nbytes: int


@dataclasses.dataclass(frozen=True)
class FactoringTable:
    """The factoring of every parameter under a rule; ``str`` formats it as a table.

    Attributes:
      rows: one for each parameter.
    """

    rows: tuple[FactoringRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all second moments."""
        return sum(row.nbytes for row in self.rows)

    def __str__(self) -> str:
        lines = [(r.path, str(r.shape), _words(r), f"{r.nbytes:,} bytes") for r in self.rows]
        lines.append(("all", "", "", f"{self.nbytes:,} bytes"))
        return aligned(lines)


def _words(row: FactoringRow) -> str:
    """Returns the factoring in sizes: rows x columns, and the number of matrices."""

    def sizes(dims: Dims) -> str:
        return "*".join(str(row.shape[d]) for d in dims)

    factoring = row.factoring
    used = (*factoring.rows, *factoring.cols, *factoring.batch)
    stacked = tuple(d for d in range(len(row.shape)) if d not in used)
    words = "full" if not factoring.factored else f"{sizes(factoring.rows)} x "
    words += sizes(factoring.cols)
    words += f", {sizes(factoring.batch)} apart" if factoring.batch else ""
    return words + (f", {sizes(stacked)} stacked" if factoring.factored and stacked else "")


def describe_factoring(rule: FactoringRule | None, params: optax.Params) -> FactoringTable:
    """Lists the factoring of every parameter under a rule, and the bytes of the second moments.

    Args:
      rule: a rule, as optimizers take it; None factors nothing.
      params: the parameters, or abstract arrays in their place.

    Returns:
      A table to print. Its bytes are those of one second moment: the state of Adafactor without
      momentum. CAME has the same again for the instability of factored parameters.

    Raises:
      ValueError: if ``rule`` is not a rule, or does not fit a parameter's shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_ext import describe_factoring, flax_transformer
      >>> params = {"layers": {"query": {"kernel": jnp.ones((2, 8, 4, 16))}}, "head": jnp.ones(5)}
      >>> print(describe_factoring(flax_transformer(), params))
      head                 (5,)           full                   20 bytes
      layers/query/kernel  (2, 8, 4, 16)  8 x 4*16, 2 apart     576 bytes
      all                                                       596 bytes
    """

    def row(path: str, leaf: Any, factoring: Factoring) -> FactoringRow:
        shape = tuple(leaf.shape)
        sides = (factoring.cols, factoring.rows) if factoring.factored else ((),)
        count = sum(math.prod(n for d, n in enumerate(shape) if d not in left) for left in sides)
        size = at_least_float32(leaf.dtype).itemsize
        return FactoringRow(path, shape, factoring, count * size)

    leaves = Leaves.of(params)
    dims = factorings(check_rule("rule", rule), leaves)
    return FactoringTable(tuple(map(row, leaves.paths, leaves.arrays, dims)))


def decay_mask(params: optax.Params, rule: FactoringRule = flax_transformer()) -> Any:
    """Selects the matrices among the parameters, to which weight decay applies.

    ``ndim > 1`` would also select attention biases (heads, head_dim) and every bias and norm scale
    of stacked layers.

    Args:
      params: the parameters, or abstract arrays in their place.
      rule: the rule; matrices are the parameters that it factors.

    Returns:
      A tree of bools like ``params``, for ``mask`` of ``optax.adamw`` or ``weight_decay_mask`` of
      ``came``. Both also accept this function itself.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> query = {"kernel": jnp.ones((8, 4, 16)), "bias": jnp.ones((4, 16))}
      >>> optax_ext.decay_mask({"query": query})
      {'query': {'bias': False, 'kernel': True}}
    """
    _validate.not_a_count("decay_mask", params)
    leaves = Leaves.of(params)
    return leaves.unflatten([d.factored for d in factorings(check_rule("rule", rule), leaves)])


def hidden_matrices(
    params: optax.Params,
    rule: FactoringRule = flax_transformer(),
    *,
    not_hidden: str = NOT_HIDDEN,
) -> Any:
    """Selects the matrices of hidden layers, which optimizers of matrices such as Muon are for.

    These are the parameters that the rule factors, without embeddings, positions and output heads.

    Args:
      params: the parameters, or abstract arrays in their place.
      rule: the rule; matrices are the parameters that it factors.
      not_hidden: a pattern of the paths of matrices that are not selected. That of the default is
        found in paths with a component such as ``embed``, ``shared_embedding``, ``embed_tokens``,
        ``Embed_0``, ``unembed``, ``wte``, ``wpe``, ``positions``, ``lm_head``, ``head``,
        ``logits``, ``logitdense`` or ``classifier``; not ``heads``, ``out`` or ``output``.

    Returns:
      A tree of bools like ``params``. This function itself is the labels of ``optax.partition``;
      ``sharding.by_owner`` has an example.

    Raises:
      ValueError: if ``rule`` is not a rule, or ``not_hidden`` is not a regular expression.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> block = {"query": {"kernel": jnp.ones((8, 4, 16)), "bias": jnp.ones((4, 16))}}
      >>> params = {"embed": {"embedding": jnp.ones((256, 8))}, "block": block}
      >>> optax_ext.hidden_matrices(params)
      {'block': {'query': {'bias': False, 'kernel': True}}, 'embed': {'embedding': False}}
    """
    _validate.pattern("not_hidden", not_hidden)
    _validate.not_a_count("hidden_matrices", params)
    leaves = Leaves.of(params)
    found = factorings(check_rule("rule", rule), leaves)
    return leaves.unflatten(
        [
            dims.factored and not re.search(not_hidden, path)
            for path, dims in zip(leaves.paths, found, strict=True)
        ]
    )
