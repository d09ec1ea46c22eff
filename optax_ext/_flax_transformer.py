"""The factoring rule for Flax transformers."""

import dataclasses
import math
import re
from collections.abc import Sequence

from optax_ext import _validate
from optax_ext._factoring import Dims, Factoring

# Paths that may be of stacked layers in Flax: "layers", "blocks" or the name of a scan; not lists
# or numbered modules, whose layers are separate arrays ("layers/0", "layers_0").
STACKED = r"(^|/)(layers|blocks|\w*[sS]can\w*)/(?!\d+(/|$))"

_EXPERTS = r"\w*([mM]o[eE]|[eE]xpert)\w*/"
# What shapes do not tell, for the arrays of one layer: a pattern of the path, the minimum rank, and
# the factoring.
_BY_NAME: tuple[tuple[str, int, Factoring], ...] = (
    # (embed, heads, head_dim)
    (r"(query|key|value)/kernel$", 3, Factoring((-3,), (-2, -1))),
    # (embed, 3, heads, head_dim): three matrices
    (r"(qkv|kv|qkv_proj|kv_proj)/kernel$", 4, Factoring((-4,), (-2, -1), (-3,))),
    # (3, heads, embed, head_dim)
    (r"(qkv|kv)_einsum/(kernel|w)$", 4, Factoring((-2,), (-3, -1), (-4,))),
    # (heads, embed, head_dim), and (heads, head_dim, embed)
    (r"q_einsum/(kernel|w)$", 3, Factoring((-2,), (-3, -1))),
    (r"attn_vec_einsum/(kernel|w)$", 3, Factoring((-3, -2), (-1,))),
    # (2, embed, hidden)
    (r"gating_einsum(/(kernel|w))?$", 3, Factoring((-2,), (-1,))),
    # (experts, embed, hidden)
    (rf"{_EXPERTS}(\w+/)?\w+$", 3, Factoring((-2,), (-1,))),
)
_VECTOR = r"(^|/)(bias|scale|\w*norm\w*|\w*norm\w*/(?!kernel$|embedding$)\w+)$"
MATRIX = r"(^|/)(kernel|embedding)$"


@dataclasses.dataclass(frozen=True)
class flax_transformer:
    """The rule for Flax transformers: embeddings, heads, attention, stacked and unstacked layers.

    The first of these that applies to a parameter:

    - ``bias``, ``scale``, the parameters of norms, attention biases (heads, head_dim) and arrays
      with one dim above 1 are vectors and are not factored.
    - Fused attention (``qkv``, ``qkv_einsum``, ``kv_einsum``) is one matrix for each of query, key
      and value. Experts, known by the name or by a router (embed, experts), and ``gating_einsum``
      stack matrices that share a clip, as in ``last_two_dims``.
    - Others are one matrix: leading dims are rows and trailing ones columns, where the state is
      smallest; heads and head_dim are on one side.

    Layers stacked along one more dim (``nn.scan``) have their own statistics, clip and scale. By
    default a module is a stack if all its arrays have an extra dim of one size: it has (layers, n)
    vectors beside (layers, n, m) matrices, or the name ``layers``, ``blocks`` or that of a scan.
    ``resolve``, which sees one array, needs ``stacked``, as do trees whose shapes leave it open.

    Attributes:
      stacked: a pattern of the paths of stacked layers; None if there are none.
      stack_dim: the dim of layers in their arrays, counted from the front; MaxText uses 1.

    Raises:
      ValueError: if ``stacked`` is not a regular expression, or ``stack_dim`` is negative; where
        the rule is used: if shapes do not tell whether layers are stacked.

    Example:
      >>> from optax_ext import flax_transformer
      >>> rule = flax_transformer(stacked="^layers/")
      >>> rule.resolve("layers/attn/query/kernel", (32, 4096, 32, 128))
      Factoring(rows=(1,), cols=(2, 3), batch=(0,))
    """

    stacked: str | None = STACKED
    stack_dim: int = 0
    # Of the tree: paths of vectors in several dims, and of stacked matrices.
    _vectors: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)
    _apart: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        _validate.pattern("stacked", self.stacked or "")
        if isinstance(self.stack_dim, bool) or not self.stack_dim >= 0:
            raise ValueError(f"stack_dim must not be negative, got {self.stack_dim!r}.")

    def resolve(self, path: str, shape: Dims) -> Factoring | None:
        if self.stacked == STACKED and re.search(STACKED, path):
            raise ValueError(
                f"flax_transformer: whether {path!r} of shape {shape} is of stacked layers depends "
                "on the other parameters. Write flax_transformer(stacked=r'^layers/'), with your "
                "pattern, or stacked=None; for_tree chooses by the paths and shapes of all."
            )
        free = self._free(path, shape)
        own = self._of_one_layer(path, tuple(shape[d] for d in free))
        sides = (own.rows, own.cols, own.batch)
        rows, cols, batch = (tuple(free[d] for d in side) for side in sides)
        of_layers = () if len(free) == len(shape) else (self.stack_dim,)
        return Factoring(rows, cols, batch + of_layers).resolve(path, shape)

    def _free(self, path: str, shape: Dims) -> list[int]:
        stacked = bool(self.stacked and re.search(self.stacked, path))
        stacked = stacked and self.stack_dim < len(shape) > max(_least_rank(path), 1)
        return [d for d in range(len(shape)) if not (stacked and d == self.stack_dim)]

    def _of_one_layer(self, path: str, sizes: Dims) -> Factoring:
        if sum(n > 1 for n in sizes) < 2 or re.search(_VECTOR, path) or path in self._vectors:
            return Factoring()
        if path in self._apart:
            return Factoring((-2,), (-1,))
        for pattern, rank, factoring in _BY_NAME:
            if len(sizes) >= rank and re.search(rf"(^|/)({pattern})", path):
                return factoring
        dims = tuple(range(len(sizes)))
        return Factoring(dims[: split_of(sizes)], dims[split_of(sizes) :])

    def for_tree(self, parameters: Sequence[tuple[str, Dims]]) -> "flax_transformer":
        rule = self if self.stacked != STACKED else self._with_stacks(parameters)
        modules: dict[str, list[tuple[str, Dims]]] = {}
        matrices: dict[Dims, list[str]] = {}
        for path, shape in parameters:
            sizes = tuple(shape[d] for d in rule._free(path, shape))
            modules.setdefault(path.rpartition("/")[0], []).append((path, sizes))
            if len(sizes) == 2:
                matrices.setdefault(sizes, []).append(path)
        vectors = set[str]()
        apart = set[str]()
        for arrays in modules.values():
            # The bias (heads, head_dim) of a kernel (embed, heads, head_dim) has one of its sides.
            kernels = [(s, split_of(s)) for _, s in arrays if len(s) > 2]
            sides = {side for s, rows in kernels for side in (s[:rows], s[rows:])}
            vectors.update(path for path, sizes in arrays if len(sizes) > 1 and sizes in sides)
            for path, sizes in arrays:
                if len(sizes) == 3 and sizes[0] < min(sizes[1:]):  # (experts, embed, hidden)
                    parts = path.split("/")
                    module = "/".join(parts[:-3] or parts[:1]) + "/"
                    routers = (p for n in sizes[1:] for p in matrices.get((n, sizes[0]), ()))
                    if any(p.startswith(module) for p in routers):
                        apart.add(path)
        return dataclasses.replace(rule, _vectors=frozenset(vectors), _apart=frozenset(apart))

    def _with_stacks(self, parameters: Sequence[tuple[str, Dims]]) -> "flax_transformer":
        """Returns the rule whose pattern is of the stacks that the shapes of a tree tell."""
        groups: dict[tuple[str, bool], list[tuple[str, Dims]]] = {}
        for path, shape in parameters:
            modules = [("", False), *((path[: m.end()], False) for m in re.finditer("/", path))]
            modules += [(path[: m.end(1)], True) for m in re.finditer(f"(?=({STACKED}))", path)]
            for module in modules:
                groups.setdefault(module, []).append((path, shape))
        stacks: list[str] = []
        for prefix, named in sorted(groups, key=lambda group: (len(group[0]), not group[1])):
            arrays = groups[prefix, named]
            if not prefix.startswith(tuple(stacks)) and self._is_stack(prefix, arrays, named):
                stacks.append(prefix)
        pattern = "|".join(map(re.escape, stacks))
        return dataclasses.replace(self, stacked=f"^({pattern})" if stacks else None)

    def _is_stack(self, prefix: str, arrays: Sequence[tuple[str, Dims]], named: bool) -> bool:
        """Whether the arrays under a prefix have an extra dim of one size; raises if it is open."""
        dim = self.stack_dim
        sizes = {shape[dim : dim + 1] for _, shape in arrays}
        if len(sizes) > 1 or () in sizes or any(len(s) <= _least_rank(p) for p, s in arrays):
            return False
        if not named and (sizes == {(1,)} or len({p.rpartition("/")[0] for p, _ in arrays}) < 2):
            return False  # no layers, or one array and its bias
        # (embed, heads, head_dim) and (height, width, in, out) may be of one layer.
        layers_first = [(shape[dim], *shape[:dim], *shape[dim + 1 :]) for _, shape in arrays]
        large = [s for s in layers_first if len(s) > 2 and split_of(s) > 1 and s[0] != s[1]]
        widths = {n for shape in large for n in (shape[1], shape[-1])}
        alone = len(large) > 1 and all(len(s) > 2 for s in layers_first)  # as under optax.partition
        if (
            any(len(s) > 1 and re.search(_VECTOR, p) and not p.endswith("bias") for p, s in arrays)
            or any(len(s) == 2 and s[0] < s[1] in widths for s in layers_first)
            or (large if named else alone and not re.search(_EXPERTS, prefix))
        ):
            return True
        if not named or any(len(shape) == 1 for _, shape in arrays):  # a vector of one layer
            return False
        path, shape = arrays[0]
        raise ValueError(
            f"flax_transformer: by their shapes the arrays under {prefix!r} may be of stacked "
            f"layers or of one, such as {path!r} of shape {shape}. If dim {dim} is of layers, "
            f"write flax_transformer(stacked={'^' + prefix!r}, stack_dim={dim}), else stacked=None."
        )


def split_of(sizes: Dims) -> int:
    """How many leading dims are the rows: for the fewest statistics, or one dim on a side."""
    last = len(sizes) - 1

    def cost(rows: int) -> tuple[int, bool]:
        return math.prod(sizes[:rows]) + math.prod(sizes[rows:]), 1 < rows < last

    return min(range(last, 0, -1), key=cost)


def _least_rank(path: str) -> int:
    """Returns the fewest dims that a parameter of this name has in one layer."""
    if re.search(_VECTOR, path):
        return 1
    for pattern, rank, _ in _BY_NAME:
        if "einsum" in pattern and re.search(rf"(^|/)({pattern})", path):
            return rank
    return 2 if re.search(MATRIX, path) else 0
