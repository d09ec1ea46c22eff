"""Rank-1 second moments: which dims are factored, how they are updated, their inverse root.

Shared by CAME and Adafactor. A matrix of squared gradients is kept as the running means of its
rows and of its columns, n + m numbers for n x m.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext import _validate
from optax_ext._passes import Dims, Function, again, is_simple, mean, sweep

# --- Which dims -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Factoring:
    """Which dims of one array form the rows and the columns of its second moment.

    ``rows`` and ``cols`` are either both empty (a full second moment is kept) or both given;
    several dims may form one side. Every slice along a ``batch`` dim is a parameter of its own,
    with its own statistics, clip and scale: the choice for stacked or scanned layers. Dims in none
    of the three are stacked: each slice has its own statistics, all share one clip.

    Attributes:
      rows: dims that index the row statistics. Negative dims count from the end.
      cols: dims that index the column statistics.
      batch: dims along which slices are independent.

    Raises:
      ValueError: if a dim is named twice, or only one of ``rows`` and ``cols`` is given.

    Example:
      An attention kernel (embed, heads, head_dim), seen as a matrix embed x (heads * head_dim):

      >>> from optax_ext import Factoring
      >>> Factoring(rows=(0,), cols=(1, 2))
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
            raise ValueError(f"{self} names a dim twice.")
        if bool(self.rows) != bool(self.cols):
            raise ValueError(f"{self} must name both rows and cols, or neither.")

    @property
    def factored(self) -> bool:
        """Whether rows and columns are kept in place of a full second moment."""
        return bool(self.rows)

    def resolve(self, path: str, shape: Dims) -> "Factoring":
        """The same dims for an array of this shape, counted from the front."""
        ndim = len(shape)
        for dim in self.rows + self.cols + self.batch:
            if not -ndim <= dim < ndim:
                raise ValueError(f"{self} names dim {dim}, but {path!r} has shape {shape}.")
        rows, cols, batch = (
            tuple(sorted(d % ndim for d in dims)) for dims in (self.rows, self.cols, self.batch)
        )
        try:
            return Factoring(rows, cols, batch)
        except ValueError as error:
            raise ValueError(f"{self} for {path!r} of shape {shape}: {error}") from None


@runtime_checkable
class FactoringRule(Protocol):
    """Gives each parameter its ``Factoring``, from its path and shape alone."""

    def resolve(self, path: str, shape: Dims) -> Factoring | None:
        """The factoring of one parameter; None keeps its full second moment."""
        ...


def _free_dims(path: str, shape: Dims, batch: Dims) -> tuple[list[int], Dims]:
    batch = Factoring(batch=batch).resolve(path, shape).batch
    return [d for d in range(len(shape)) if d not in batch], batch


@dataclasses.dataclass(frozen=True)
class last_two_dims:
    """Rows are the last dim but one, columns the last; vectors are not factored.

    The rule of CAME's authors. With Flax's layouts it is right for dense and convolution kernels;
    attention kernels want ``flax_attention``.

    Attributes:
      min_dim_size: both dims must be at least this long, else the full moment is kept.
      batch: dims of independent slices, not counted among the last two.

    Example:
      >>> from optax_ext import last_two_dims
      >>> last_two_dims().resolve("conv", (3, 3, 16, 32))
      Factoring(rows=(2,), cols=(3,), batch=())
    """

    min_dim_size: int = 1
    batch: Dims = ()

    def resolve(self, path: str, shape: Dims) -> Factoring | None:
        """The factoring of one parameter."""
        free, batch = _free_dims(path, shape, self.batch)
        if len(free) < 2 or min(shape[free[-2]], shape[free[-1]]) < self.min_dim_size:
            return Factoring(batch=batch)
        return Factoring((free[-2],), (free[-1],), batch)


@dataclasses.dataclass(frozen=True)
class two_largest_dims:
    """Columns are the largest dim, rows the second largest; the rule of ``optax.adafactor``.

    Attributes:
      min_dim_size: both dims must be at least this long, else the full moment is kept.
      batch: dims of independent slices, not counted among the largest.

    Example:
      >>> from optax_ext import two_largest_dims
      >>> two_largest_dims().resolve("kernel", (4096, 32, 128))
      Factoring(rows=(2,), cols=(0,), batch=())
    """

    min_dim_size: int = 128
    batch: Dims = ()

    def resolve(self, path: str, shape: Dims) -> Factoring | None:
        """The factoring of one parameter."""
        free, batch = _free_dims(path, shape, self.batch)
        by_size = sorted(free, key=lambda d: shape[d])
        if len(free) < 2 or shape[by_size[-2]] < self.min_dim_size:
            return Factoring(batch=batch)
        return Factoring((by_size[-2],), (by_size[-1],), batch)


@dataclasses.dataclass(frozen=True, init=False)
class by_path:
    """The first pattern found in a parameter's path decides.

    Paths are the keys joined by ``/``, such as ``params/block_0/attn/query/kernel``, whether or not
    the parameter is in a Flax box (``nn.Partitioned``, ``nnx.Param``); a pattern is a regular
    expression that may match anywhere in it (``re.search``).

    Args:
      rules: pattern -> ``Factoring``, another rule, or None for a full second moment.
      default: what decides where no pattern is found.

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
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"pattern {pattern!r} is not a regular expression: {error}."
                ) from None
            check_rule(f"the rule of pattern {pattern!r}", rule)
        object.__setattr__(self, "rules", tuple(rules.items()))
        object.__setattr__(self, "default", check_rule("default", default))

    def resolve(self, path: str, shape: Dims) -> Factoring | None:
        """The factoring of one parameter."""
        rule = next((r for p, r in self.rules if re.search(p, path)), self.default)
        return None if rule is None else rule.resolve(path, shape)


def flax_attention(
    *,
    batch: Dims = (),
    default: FactoringRule | None = None,
) -> by_path:
    """The rule for Flax's attention alone: heads and head_dim together are one side of the matrix.

    ``flax_transformer`` is right for whole models, stacked or not.

    Kernels of ``query``, ``key`` and ``value`` are (..., embed, heads, head_dim), those of ``out``
    (..., heads, head_dim, embed); their biases are vectors in two dims and keep the full moment.
    ``last_two_dims`` would keep statistics for every embed row: 0.8 bytes a parameter where this
    rule keeps 0.01.

    Args:
      batch: dims of independent slices in every parameter, such as (0,) under ``nn.scan``. A kernel
        or embedding of two dims is not stacked: it is a matrix, as (vocab, embed) is.
      default: the rule for all other parameters; None means ``last_two_dims(batch=batch)``, and
        ``last_two_dims()`` for kernels and embeddings of two dims.

    Example:
      >>> from optax_ext import flax_attention
      >>> flax_attention().resolve("block/attn/out/kernel", (12, 64, 768))
      Factoring(rows=(0, 1), cols=(2,), batch=())
    """
    if default is None:
        default = last_two_dims(batch=batch)
        if batch:
            matrix = {r"(^|/)(kernel|embedding)$": _at_least_a_matrix(batch)}
            default = by_path(matrix, default=default)
    return by_path(
        {
            r"(^|/)(query|key|value)/kernel$": Factoring((-3,), (-2, -1), batch),
            r"(^|/)(query|key|value)/bias$": Factoring(batch=batch),
            r"(^|/)out/kernel$": Factoring((-3, -2), (-1,), batch),
        },
        default=default,
    )


@dataclasses.dataclass(frozen=True)
class _at_least_a_matrix:
    """The last two dims; ``batch`` counts only where two dims are left beside it."""

    batch: Dims

    def resolve(self, path: str, shape: Dims) -> Factoring | None:
        """The factoring of one parameter."""
        stacked = len(shape) >= 2 + len(self.batch)
        return last_two_dims(batch=self.batch if stacked else ()).resolve(path, shape)


def check_rule(name: str, rule: Any) -> Any:
    """The rule, or an error that names the argument it came in."""
    if rule is None or (isinstance(rule, FactoringRule) and not isinstance(rule, type)):
        return rule
    raise ValueError(
        f"{name} must be a Factoring, a rule such as last_two_dims(), or None; got {rule!r}."
    )


# --- One array ------------------------------------------------------------------------------


class Moment(NamedTuple):
    """The second moment of one array: ``full``, or ``row`` and ``col``; the others are None."""

    full: jax.Array | None  # the parameter's shape
    row: jax.Array | None  # the parameter's shape without the column dims
    col: jax.Array | None  # the parameter's shape without the row dims

    @property
    def dtype(self) -> Any:
        """The dtype of the averages, in which the step is computed."""
        return next(slot.dtype for slot in self if slot is not None)


def init_moment(like: Any, factoring: Factoring, dtype: Any) -> Moment:
    """Zeros; the factored ones are reductions of zeros like ``like``, to inherit its sharding."""
    zeros = jnp.zeros_like(like, dtype=dtype)
    if not factoring.factored:
        return Moment(zeros, None, None)
    return Moment(None, jnp.sum(zeros, axis=factoring.cols), jnp.sum(zeros, axis=factoring.rows))


def update_moment(
    moment: Moment,
    fn: Function,
    array: jax.Array,
    args: Any,
    eps: Any,
    decay: Any,
    weight: Any,
    factoring: Factoring,
) -> tuple[Moment, jax.Array | None]:
    """``decay * moment + weight * (x + eps)``, where ``(x, new) = fn(array, args)``; and ``new``.

    Of a factored moment, with the means of ``x`` over columns and over rows.
    """
    if moment.full is not None:
        x, new = fn(array, args)
        return Moment(decay * moment.full + weight * (x + eps), None, None), new
    (row, col), new = sweep(fn, array, args, factoring.cols, factoring.rows)
    return Moment(
        None,
        decay * moment.row + weight * (row + eps),
        decay * moment.col + weight * (col + eps),
    ), new


def level(moment: Moment, factoring: Factoring) -> jax.Array | None:
    """The mean of a factored moment's rows, shaped to broadcast against the array."""
    if moment.row is None:
        return None
    return mean(jnp.expand_dims(moment.row, factoring.cols), factoring.rows, keepdims=True)


def root_factors(
    moment: Moment, level: jax.Array | None, factoring: Factoring
) -> tuple[jax.Array, ...]:
    """Factors whose product is ``1 / sqrt(moment)``; a factored one is ``row * col / level``.

    The product row * col is never formed (it leaves float32's range where the quotient does not).
    """
    if moment.full is not None:
        return (jax.lax.rsqrt(moment.full),)
    assert moment.row is not None
    assert moment.col is not None
    assert level is not None
    row = jnp.expand_dims(moment.row, factoring.cols)
    col = jnp.expand_dims(moment.col, factoring.rows)
    return jax.lax.rsqrt(row) * jnp.sqrt(level), jax.lax.rsqrt(col)


def times(x: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
    """``x`` times each factor in turn: its row first, which keeps an all-zero row at zero."""
    for factor in factors:
        x = x * factor
    return x


def update_squares(
    moment: Moment, g: jax.Array, eps: Any, decay: Any, weight: Any, factoring: Factoring
) -> tuple[Moment, jax.Array | None]:
    """``decay * moment + weight * (g**2 + eps)``, or its means over rows and columns; its level."""

    def square(g: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return jnp.square(g.astype(moment.dtype)), None

    moment, _ = update_moment(moment, square, g, (), eps, decay, weight, factoring)
    return moment, level(moment, factoring)


def normalizers(
    moment: Moment,
    level: jax.Array | None,
    g: jax.Array,
    threshold: Any | None,
    factoring: Factoring,
) -> tuple[jax.Array, ...]:
    """Factors that take ``g`` to ``u = g / sqrt(moment)``, and to ``u / max(1, RMS(u) / d)``.

    Every batch slice has its own RMS; a threshold ``d`` of None does not clip.
    """
    factors = root_factors(moment, level, factoring)
    if threshold is None or not g.size:
        return factors
    threshold = _validate.hyperparameter(threshold, moment.dtype)
    u = times(g.astype(moment.dtype), again(factors, factors))
    return (*factors, 1.0 / jnp.maximum(1.0, rms(u, factoring) / threshold))


def rms(x: jax.Array, factoring: Factoring) -> jax.Array:
    """The root mean square of every batch slice, shaped to broadcast against ``x``."""
    dims = tuple(d for d in range(x.ndim) if d not in factoring.batch)
    # Divided at the end: XLA on CPUs would write a matrix of the scale that arrays share. By a
    # float: JAX makes int32 of an integer, and large models have arrays of more elements.
    count = float(math.prod(x.shape[d] for d in dims))
    return jnp.sqrt(jnp.sum(jnp.square(x), dims, keepdims=True) / count)


def per_shape(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an array and static arguments, traced once for all arrays of one shape.

    Its first argument is the hyperparameters; where one is traced, each array traces the kernel.
    """

    def traced(simple: bool, hyper: Any, dims: Factoring, *arrays: Any) -> Any:
        del simple  # beside the arguments, all that a trace depends on
        return kernel(hyper, dims, *arrays)

    traced.__name__ = kernel.__name__  # in profiles
    compiled = jax.jit(traced, static_argnums=(0, 1, 2))

    def call(hyper: Any, dims: Factoring, *arrays: Any) -> Any:
        known = all(h is None or isinstance(h, int | float | np.dtype) for h in hyper)
        if not known:
            return kernel(hyper, dims, *arrays)
        return compiled(is_simple(), hyper, dims, *arrays)

    return call


def each(
    kernel: Callable[..., Any],
    hyper: Any,
    dims: Sequence[Factoring],
    grads: Sequence[jax.Array],
    *columns: Sequence[Any],
) -> list[Any]:
    """What a kernel of one array gives for every array of a tree."""
    return [kernel(hyper, *arguments) for arguments in zip(dims, grads, *columns, strict=True)]


# --- Trees ----------------------------------------------------------------------------------


def accumulator_dtype(dtype: Any) -> Any:
    """Float32, or wider if the parameter is: 16-bit averages stop moving at 0.999."""
    return jnp.promote_types(dtype, jnp.float32)


def leaves_with_factoring(
    tree: Any, rule: FactoringRule | None
) -> tuple[list[tuple[str, Any, Factoring]], Any]:
    """(path, leaf, factoring) for every leaf, and the tree's structure."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)

    def one(path: Any, leaf: Any) -> tuple[str, Any, Factoring]:
        name = _path_name(path)
        _validate.floating(name, leaf)
        shape = tuple(leaf.shape)
        # An array without elements has no means to keep.
        found = rule.resolve(name, shape) if rule is not None and math.prod(shape) else None
        return name, leaf, (found or Factoring()).resolve(name, shape)

    return [one(path, leaf) for path, leaf in flat], treedef


def _path_name(path: Any) -> str:
    """The keys joined by ``/``, without the ``.value`` of a Flax box around the parameter."""
    boxed = len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value")
    return jax.tree_util.keystr(path[:-1] if boxed else path, simple=True, separator="/")


def split_moments(treedef: Any, moments: list[Moment]) -> tuple[Any, Any, Any]:
    """Trees of the full, row and col moments, None where a leaf has no such slot."""
    return tuple(
        treedef.unflatten([getattr(moment, field) for moment in moments])
        for field in Moment._fields
    )


def entries(treedef: Any, field: str, tree: Any) -> list[Any]:
    """The entry of each gradient leaf in one field of the state; None where it has no such slot."""
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"the gradients' tree does not match the state's field {field!r}: {error}"
        ) from None


def join_moments(
    treedef: Any, leaves: list[tuple[str, Any, Factoring]], **fields: Any
) -> list[Moment]:
    """The moment of each leaf, from the state's fields (named, in the order full, row, col)."""
    columns = [entries(treedef, field, tree) for field, tree in fields.items()]
    moments = [Moment(*slots) for slots in zip(*columns, strict=True)]
    for (path, leaf, factoring), moment in zip(leaves, moments, strict=True):
        want = _moment_shapes(tuple(leaf.shape), factoring)
        have = [None if slot is None else tuple(slot.shape) for slot in moment]
        if want != have:
            raise ValueError(
                f"gradient {path!r} of shape {tuple(leaf.shape)} does not match the state: its "
                f"{tuple(fields)} should have shapes {want}, found {have}. The state belongs to "
                "other parameters or another factoring rule."
            )
    return moments


def check_shapes(leaves: list[tuple[str, Any, Factoring]], field: str, arrays: list[Any]) -> None:
    """Raises unless each gradient has the shape of its array in ``field``."""
    for (path, leaf, _), array in zip(leaves, arrays, strict=True):
        if leaf.shape != array.shape:
            raise ValueError(
                f"gradient {path!r} of shape {tuple(leaf.shape)} does not match {field!r}, where "
                f"it has shape {tuple(array.shape)}."
            )


def _moment_shapes(shape: Dims, factoring: Factoring) -> list[Dims | None]:
    if not factoring.factored:
        return [shape, None, None]
    return [None] + [
        tuple(n for d, n in enumerate(shape) if d not in dims)
        for dims in (factoring.cols, factoring.rows)
    ]
