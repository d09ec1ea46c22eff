"""Forms: what is stored of a parameter, and what a loss sees of it.

A form is a node of the parameters' tree in the place of an array. Its parts have the leading dims
of that, such as one of layers, so that a loop over layers takes slices of the parts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext import Quantized
from optax_ext.low_precision import dequantize


class Form:
    """What stands for an array in a tree of parameters."""

    dtype: Any

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
        raise NotImplementedError

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
    """A stack of arrays in a format of ``optax_ext``, such as ``Linear(4)`` or ``Float8()``."""

    parts: tuple[jax.Array, ...]  #: codes, scales and others
    kind: Any = dataclasses.field(metadata={"static": True})  #: of one array of the stack
    dtype: Any = dataclasses.field(metadata={"static": True})  #: of what the loss sees

    @classmethod
    def of(cls, quantized: Quantized, dtype: Any) -> "Coded":
        """Of a stack, by its parts: transformations take no node ``Quantized`` in parameters."""
        parts, kind = jax.tree.flatten(quantized)
        return cls(tuple(parts), kind, dtype)

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

    def decode(self) -> jax.Array:
        return each_of_stack(dequantize, self.stacked)(self.quantized).astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Form):
    r"""A frozen parameter and a low-rank addition, which is trained.

    .. math:: W = W_0 + s\,A B

    References:
      Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, arXiv 2106.09685.
    """

    base: Any  #: W_0 (stack..., rows..., columns...): an array or a form
    a: jax.Array  #: (stack..., rows..., rank)
    b: jax.Array  #: (stack..., rank, columns...)
    scale: float = dataclasses.field(metadata={"static": True})  #: alpha / rank
    columns: int = dataclasses.field(default=1, metadata={"static": True})  #: dims of columns
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

    def decode(self) -> jax.Array:
        if self.dropout:
            raise ValueError(
                f"dropout is before A, and the loss uses the adapted parameter of shape "
                f"{self.shape} elsewhere than in a product with its rows. Leave dropout out, or "
                "that adapter."
            )
        product = each_of_stack(lambda ab: jnp.tensordot(ab[0], ab[1], axes=1), self.stacked)
        low = self.scale * product((self.a, self.b))
        base = self.frozen()
        return base + low.astype(base.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masked(Form):
    """A pruned parameter: zero wherever the mask is, whatever the optimizer does."""

    values: jax.Array  #: trained
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

    def decode(self) -> jax.Array:
        return jnp.where(self.kept, self.values, 0)
