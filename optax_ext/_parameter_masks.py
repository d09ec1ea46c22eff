"""Which parameters decay, and which are matrices of hidden layers: masks and labels for optax."""

import re
from typing import Any

import optax

from optax_ext import _validate
from optax_ext._factoring import Factoring, FactoringRule, check_rule, factorings
from optax_ext._flax_transformer import MATRIX, flax_transformer
from optax_ext._leaves import Leaves
from optax_ext._types import Array

# Names of a parameter, or of a module around it, that is not of a hidden layer: embeddings (embed,
# shared_embedding, embed_tokens, Embed_0, pos_embedding, unembed), positions and output heads.
# "heads", "out" and "output" are of attention and of hidden layers.
NOT_HIDDEN = (
    r"(^|/)(\w*[eE]mb(ed(der|dings?)?)?s?(_(\d+|tokens|positions|table))?"
    r"|wte|wpe|pos|positions?|((lm|mlp|output|classifier)_)?head|logits?_?(dense|proj)?"
    r"|classifier|readout)(_?\d+)?(/|$)"
)


def decay_mask(params: optax.Params, rule: FactoringRule = flax_transformer()) -> Any:
    """Selects the matrices, to which weight decay applies, in a tree of bools: a mask for optax.

    Args:
      params: the parameters, or abstract arrays in their place.
      rule: the rule; matrices are the parameters that it factors, and kernels (n, 1).

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> query = {"kernel": jnp.ones((8, 4, 16)), "bias": jnp.ones((4, 16))}
      >>> optax_ext.decay_mask({"query": query})
      {'query': {'bias': False, 'kernel': True}}
    """
    _validate.not_a_count("decay_mask", params)
    leaves = Leaves.of(params)
    dims = factorings(check_rule("rule", rule), leaves)
    return leaves.unflatten(list(map(_is_matrix, leaves.paths, leaves.arrays, dims)))


def _is_matrix(path: str, leaf: Array, dims: Factoring) -> bool:
    free = [n for d, n in enumerate(leaf.shape) if d not in dims.batch]
    thin = len(free) == 2 and 1 in free and re.search(MATRIX, path)  # the kernel of a value head
    return dims.factored or bool(thin)


def hidden_matrices(
    params: optax.Params, rule: FactoringRule = flax_transformer(), *, not_hidden: str = NOT_HIDDEN
) -> Any:
    """Selects the matrices of hidden layers, which optimizers of matrices such as Muon are for.

    These are the parameters that the rule factors, without embeddings, positions and output heads,
    in a tree of bools: labels for ``optax.partition``. ``not_hidden`` is a pattern of the paths of
    matrices that are not selected: by default components such as ``embed``, ``wte``, ``positions``,
    ``lm_head``, ``logits``; not ``heads``, ``out``. Other arguments are those of ``decay_mask``.

    Raises:
      ValueError: if ``rule`` is not a rule, or ``not_hidden`` is not a regular expression.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> params = {"embed": {"embedding": jnp.ones((9, 8))}, "mlp": {"kernel": jnp.ones((8, 32))}}
      >>> optax_ext.hidden_matrices(params)
      {'embed': {'embedding': False}, 'mlp': {'kernel': True}}
    """
    _validate.pattern("not_hidden", not_hidden)
    _validate.not_a_count("hidden_matrices", params)
    leaves = Leaves.of(params)
    dims = factorings(check_rule("rule", rule), leaves)
    hidden = [not re.search(not_hidden, path) for path in leaves.paths]
    return leaves.unflatten([d.factored and h for d, h in zip(dims, hidden, strict=True)])
