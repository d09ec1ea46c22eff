"""Which dims of a parameter are factored: ``Factoring``, and the rules that choose one by path."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from optax_ext import _validate
from optax_ext._leaves import Dims as Dims
from optax_ext._leaves import Leaves


@dataclasses.dataclass(frozen=True)
class Factoring:
    """Which dims of one array form the rows and the columns of its second moment.

    Negative dims count from the end; several may form one side. Dims in none of the three are
    stacked: each slice has its own statistics, and all share one clip.

    Attributes:
      rows: dims that index the row statistics.
      cols: dims that index the column statistics; without both, the second moment is full.
      batch: dims along which slices have their own statistics, clip and scale, as stacked layers.

    Raises:
      ValueError: if a dim is named twice, or only one of ``rows`` and ``cols`` is given.

    Example:
      >>> from optax_ext import Factoring
      >>> Factoring(rows=(0,), cols=(1, 2))  # an attention kernel (embed, heads, head_dim)
      Factoring(rows=(0,), cols=(1, 2), batch=())
    """

    rows: Dims = ()
    cols: Dims = ()
    batch: Dims = ()

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "batch"):
            object.__setattr__(self, name, tuple(int(d) for d in getattr(self, name)))
        dims = self.rows + self.cols + self.batch
        if len(set(dims)) != len(dims):
            raise ValueError(f"{self} names a dim twice; every dim belongs to at most one side.")
        if bool(self.rows) != bool(self.cols):
            raise ValueError(f"{self} must name both rows and cols, or neither.")

    @property
    def factored(self) -> bool:
        """Whether row and column statistics replace the full second moment."""
        return bool(self.rows)

    def resolve(self, path: str, shape: Dims) -> "Factoring":
        """Returns the same dims for an array of this shape, counted from the front.

        Raises:
          ValueError: if the array lacks a dim, or two of them are the same.
        """
        ndim = len(shape)
        for dim in self.rows + self.cols + self.batch:
            if not -ndim <= dim < ndim:
                raise ValueError(
                    f"{self} names dim {dim}, but {path!r} has shape {shape}; choose another rule "
                    "for this parameter, for example with by_path."
                )
        sides = (self.rows, self.cols, self.batch)
        rows, cols, batch = (tuple(sorted(d % ndim for d in side)) for side in sides)
        try:
            return Factoring(rows, cols, batch)
        except ValueError as error:
            raise ValueError(f"{self} for {path!r} of shape {shape}: {error}") from None


@runtime_checkable
class FactoringRule(Protocol):
    """Maps the path and the shape of a parameter to its ``Factoring``.

    Where other parameters count, ``for_tree(parameters)`` makes a rule of all paths and shapes.
    """

    def resolve(self, path: str, shape: Dims) -> Factoring | None:
        """Returns the factoring of one parameter; None means a full second moment."""
        ...


@dataclasses.dataclass(frozen=True)
class last_two_dims:
    """Rows are the second-to-last dim, columns the last; the rule of CAME's authors.

    Attributes:
      min_dim_size: both dims must be at least this long, else the parameter is not factored.
      batch: dims of independent slices, not counted among the last two.

    Example:
      >>> from optax_ext import last_two_dims
      >>> last_two_dims().resolve("conv", (3, 3, 16, 32))
      Factoring(rows=(2,), cols=(3,), batch=())
    """

    min_dim_size: int = 1
    batch: Dims = ()

    def resolve(self, path: str, shape: Dims) -> Factoring | None:
        batch = Factoring(batch=self.batch).resolve(path, shape).batch
        dims = self._in_order([d for d in range(len(shape)) if d not in batch], shape)[-2:]
        if len(dims) < 2 or min(shape[d] for d in dims) < self.min_dim_size:
            return Factoring(batch=batch)
        return Factoring((dims[0],), (dims[1],), batch)

    def _in_order(self, dims: list[int], shape: Dims) -> list[int]:
        return dims


@dataclasses.dataclass(frozen=True)
class two_largest_dims(last_two_dims):
    """Columns are the largest dim, rows the second largest; the rule of ``optax.adafactor``.

    Attributes are those of ``last_two_dims``; dims of ``batch`` are not counted among the largest.

    Example:
      >>> from optax_ext import two_largest_dims
      >>> two_largest_dims().resolve("kernel", (4096, 32, 128))
      Factoring(rows=(2,), cols=(0,), batch=())
    """

    min_dim_size: int = 128

    def _in_order(self, dims: list[int], shape: Dims) -> list[int]:
        return sorted(dims, key=lambda d: shape[d])


@dataclasses.dataclass(frozen=True, init=False)
class by_path:
    """Chooses the rule of the first pattern that is found in a parameter's path.

    Paths are the keys joined by ``/``, such as ``params/block_0/attn/query/kernel``, without Flax's
    boxes; patterns are regular expressions that may match anywhere.

    Args:
      rules: pattern -> ``Factoring``, another rule, or None for a full second moment.
      default: the rule of parameters whose path matches no pattern.

    Raises:
      ValueError: if a pattern is not a regular expression, or a rule is not a rule.

    Example:
      >>> from optax_ext import Factoring, by_path
      >>> rule = by_path({r"query/kernel$": Factoring((0,), (1, 2)), r"embedding$": None})
      >>> rule.resolve("attn/query/kernel", (64, 4, 16))
      Factoring(rows=(0,), cols=(1, 2), batch=())
    """

    rules: tuple[tuple[str, FactoringRule | None], ...]
    default: FactoringRule | None

    def __init__(
        self,
        rules: Mapping[str, FactoringRule | None],
        *,
        default: FactoringRule | None = last_two_dims(),
    ):
        for pattern, rule in rules.items():
            _validate.pattern("by_path", pattern)
            check_rule(f"the rule of pattern {pattern!r}", rule)
        object.__setattr__(self, "rules", tuple(rules.items()))
        object.__setattr__(self, "default", check_rule("default", default))

    def resolve(self, path: str, shape: Dims) -> Factoring | None:
        rule = next((r for p, r in self.rules if re.search(p, path)), self.default)
        return None if rule is None else rule.resolve(path, shape)

    def for_tree(self, parameters: Sequence[tuple[str, Dims]]) -> "by_path":
        rules = {pattern: _for_tree(rule, parameters) for pattern, rule in self.rules}
        return by_path(rules, default=_for_tree(self.default, parameters))


def check_rule(name: str, rule: Any) -> Any:
    if rule is None or (isinstance(rule, FactoringRule) and not isinstance(rule, type)):
        return rule
    raise ValueError(
        f"{name} must be a Factoring, a rule such as last_two_dims(), or None; got {rule!r}."
    )


def _for_tree(rule: Any, parameters: Sequence[tuple[str, Dims]]) -> Any:
    return rule.for_tree(parameters) if hasattr(rule, "for_tree") else rule


def factorings(rule: FactoringRule | None, leaves: Leaves) -> list[Factoring]:
    """Returns the factoring of every leaf, with dims counted from the front."""
    # An array without elements has no means.
    parameters = list(zip(leaves.paths, (tuple(x.shape) for x in leaves.arrays), strict=True))
    rule = _for_tree(rule, [(path, shape) for path, shape in parameters if 0 not in shape])

    def factoring(path: str, shape: Dims) -> Factoring:
        dims = rule.resolve(path, shape) if rule is not None and 0 not in shape else None
        return (dims or Factoring()).resolve(path, shape)

    return [factoring(path, shape) for path, shape in parameters]
