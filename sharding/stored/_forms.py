"""Forms: what is stored of a parameter, and what a loss sees of it.

A form is a node of the parameters' tree in the place of an array. Its parts have the leading dims
of that, such as one of layers, so that a loop over layers takes slices of the parts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext import Quantized
from optax_ext.low_precision import dequantize
from sharding.collectives._sum_dtype import to_sum_dtype


class Form:
    """What stands for an array in a tree of parameters."""

    dtype: Any
    trained_parts: ClassVar[tuple[str, ...]] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what the loss sees."""
        raise NotImplementedError

    @property
    def stacked(self) -> int:
        """How many leading dims stack arrays that are stored alike, and can be sliced."""
        raise NotImplementedError

    def decode(self) -> jax.Array:
        """What the loss sees."""
        found: jax.Array = each_of_stack(lambda one: one.decode_one(), self.stacked)(self)
        return found

    def decode_one(self) -> jax.Array:
        """What the loss sees of one array, where none are stacked."""
        raise NotImplementedError

    def trained_marks(self) -> Any:
        """The form with bools for its parts, whether they are trained; placement asks for it."""
        marks: Any = jax.tree.map(lambda _: False, self)
        own = {name: getattr(self, name) for name in self.trained_parts}
        return dataclasses.replace(marks, **jax.tree.map(lambda _: True, own))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, over all devices."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


def each_of_stack(fn: Callable[[Any], Any], dims: int) -> Callable[[Any], Any]:
    """A function of one array or form, over leading dims of a stack."""
    for _ in range(dims):
        fn = jax.vmap(fn)
    return fn


def each_array(fn: Callable[[Any], Any], x: Any, stacked: int) -> Any:
    """What a function of one array, or form, gives for each of a stack of so many dims.

    On devices at once; in host memory or in files one by one, and then in host memory.
    """
    parts = jax.tree.leaves(x)
    if all(isinstance(part, jax.Array) for part in parts):
        return each_of_stack(fn, stacked)(x)

    run, stack = jax.jit(fn), parts[0].shape[:stacked]
    found = [jax.device_get(run(at_index(x, index))) for index in np.ndindex(*stack)]
    return jax.tree.map(lambda *of: np.stack(of).reshape((*stack, *of[0].shape)), *found)


def at_index(x: Any, index: tuple[int, ...]) -> Any:
    """An array, or form, of a stack."""
    return jax.tree.map(lambda part: jnp.asarray(np.asarray(part[index])), x)


def decoded(x: Any) -> Any:
    """What the loss sees of a parameter, a form or not."""
    return _decode_form(x) if isinstance(x, Form) else x


@jax.jit  # a function of its own, which plans count as one pass over memory
def _decode_form(form: Form) -> jax.Array:
    return form.decode()


DECODE = "_decode_form"  # the name of that in jaxprs


def is_form(x: Any) -> bool:
    return isinstance(x, Form)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded(Form):
    """A stack of arrays in a format of ``optax_ext``, such as ``Linear(4)`` or ``Float8()``.

    It has the parts of a ``Quantized``, a node that no transformation takes in parameters.
    """

    parts: tuple[jax.Array, ...]  #: codes, scales and others
    kind: Any = dataclasses.field(metadata={"static": True})  #: of one array of the stack
    dtype: Any = dataclasses.field(metadata={"static": True})  #: of what the loss sees

    @property
    def quantized(self) -> Quantized:
        """Of the stack; its ``shape`` is that of one array."""
        found: Quantized = jax.tree.unflatten(self.kind, self.parts)
        return found

    @property
    def stacked(self) -> int:
        return len(self.quantized.codes.shape) - len(self.quantized.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quantized.codes.shape[: self.stacked], *self.quantized.shape)

    def decode_one(self) -> jax.Array:
        return dequantize(self.quantized).astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Form):
    r"""A frozen parameter and a low-rank addition, which is trained.

    .. math:: W = W_0 + s\,A B

    With DoRA the sum V has trained magnitudes m of its columns; its norm counts as a constant.

    .. math:: W = V \, m / |V|, \quad V = W_0 + s\,A B

    References:
      Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, arXiv 2106.09685.
      Liu et al.: DoRA: Weight-Decomposed Low-Rank Adaptation, ICML 2024, arXiv 2402.09353.
    """

    trained_parts = ("a", "b", "magnitude")

    base: Any  #: W_0 (stack..., rows..., columns...): an array or a form
    a: jax.Array  #: (stack..., rows..., rank)
    b: jax.Array  #: (stack..., rank, columns...)
    scale: float = dataclasses.field(metadata={"static": True})  #: alpha / rank
    columns: int = dataclasses.field(default=1, metadata={"static": True})  #: dims of columns
    magnitude: Any = None  #: m (stack..., columns...) of DoRA
    key: Any = None  #: keys (stack...) of the dropout before A, in a loss that has it
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})  #: its rate

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def stacked(self) -> int:
        return len(self.b.shape) - self.columns - 1

    @property
    def rank(self) -> int:
        return self.b.shape[self.stacked]

    @property
    def rows(self) -> int:
        """The number of dims of rows."""
        return len(self.a.shape) - self.stacked - 1

    def dropped(self, x: jax.Array) -> jax.Array:
        """What A is multiplied with."""
        if not self.dropout:
            return x
        kept = jax.random.bernoulli(self.key, 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), 0)

    def frozen(self) -> jax.Array:
        """W_0, decoded."""
        full: jax.Array = decoded(jax.lax.stop_gradient(self.base))
        return full

    def sum(self) -> jax.Array:
        """W_0 + s A B of one array."""
        base = self.frozen()
        return base + (self.scale * jnp.tensordot(self.a, self.b, axes=1)).astype(base.dtype)

    def factor(self) -> jax.Array:
        """Of each column of one array with DoRA: ``m / |V|``, (columns...)."""
        norm = column_norms(jax.lax.stop_gradient(self.sum()), self.columns)
        return self.magnitude / jnp.where(norm > 0, norm, 1)

    def decode_one(self) -> jax.Array:
        if self.dropout:
            raise ValueError(
                f"dropout is before A, and the loss uses an adapted parameter of shape "
                f"{self.shape} elsewhere than in a product with its rows. Leave dropout out, or "
                "that adapter."
            )
        total = self.sum()
        if self.magnitude is None:
            return total
        return (total * jnp.expand_dims(self.factor(), tuple(range(self.rows)))).astype(total.dtype)


def column_norms(w: jax.Array, columns: int) -> jax.Array:
    """The norms (columns...) over the rows of an array, float32 at least."""
    rows = tuple(range(w.ndim - columns))
    return jnp.sqrt(jnp.sum(jnp.square(to_sum_dtype(w)), axis=rows))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masked(Form):
    """A pruned parameter: zero wherever the mask is, whatever the optimizer does."""

    trained_parts = ("values",)

    values: jax.Array
    kept: jax.Array  #: bool, of the same shape

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def stacked(self) -> int:
        return len(self.values.shape)

    def decode_one(self) -> jax.Array:
        return jnp.where(self.kept, self.values, 0)
