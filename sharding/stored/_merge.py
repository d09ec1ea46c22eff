"""From forms back to arrays, or to other codes; adapters as peft reads them."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from sharding._types import Tree
from sharding.stored._files import Index, Lazy
from sharding.stored._forms import Adapted, Form, decoded, is_form
from sharding.stored._store import Step, paths_of


def merge(params: Tree, to: Step | None = None) -> Any:
    """Parameters as the loss sees them, without forms; adapters are added to their matrices.

    Args:
      params: parameters, of which some are stored in forms.
      to: with ``frozen(...)``, adapted parameters are stored so, an array of a stack at a time.

    Returns:
      Parameters; with ``to`` also the relative error of each that it encoded, by its path, in the
      Frobenius norm.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from sharding import stored
      >>> params = {"w": jnp.ones((64, 64))}
      >>> forms = {"w": (stored.frozen(4), stored.lora(2))}
      >>> params = stored.store(params, forms, jax.random.key(0))
      >>> float(stored.merge(params)["w"][0, 0])
      1.0
      >>> params, errors = stored.merge(params, stored.frozen(4))
      >>> type(params["w"]).__name__, errors
      ('NormalFloat4', {'w': 0.0})
    """
    if to is None:
        return jax.tree.map(decoded, params, is_leaf=is_form)
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_form)
    errors = {}
    for i, path in enumerate(paths_of(params)):
        if isinstance(leaves[i], Adapted):
            exact = _by_index(leaves[i])
            leaves[i] = to(exact, path, None)
            errors[path] = _relative_error(_by_index(leaves[i]), exact, leaves[i].stacked)
    return treedef.unflatten(leaves), errors


def _by_index(form: Form) -> Lazy:
    """What a form decodes to, one array of its stack at a time."""

    def read(index: Index) -> Any:
        own, rest = index[: form.stacked], index[form.stacked :]
        one: Form = jax.tree.map(lambda part: part[own], form)
        return one.decode()[rest]

    return Lazy(form.shape, form.dtype, read)


def _relative_error(found: Lazy, exact: Lazy, stacked: int) -> float:
    squares = np.zeros(2)
    for index in np.ndindex(*exact.shape[:stacked]):
        w = exact[index].astype(np.float64)
        squares += [np.sum((found[index] - w) ** 2), np.sum(w**2)]
    return float(np.sqrt(squares[0] / squares[1])) if squares[0] else 0.0


def adapters(params: Tree) -> dict[str, Adapted]:
    """The adapted parameters, by their paths.

    Args:
      params: parameters, of which some are stored in forms.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from sharding import stored
      >>> params = {"layer": {"w": jnp.ones((64, 64))}}
      >>> params = stored.store(params, {"w": stored.lora(2)}, jax.random.key(0))
      >>> list(stored.adapters(params))
      ['layer/w']
    """
    named = zip(paths_of(params), jax.tree.leaves(params, is_leaf=is_form), strict=True)
    return {path: x for path, x in named if isinstance(x, Adapted)}


def peft(
    params: Tree, name_of: Callable[[str, tuple[int, ...]], str] | None = None
) -> dict[str, np.ndarray]:
    """Adapters by the names, and in the form, that Hugging Face's peft reads.

    Args:
      params: parameters, of which some are adapted.
      name_of: from a path and an index in its stack to the name of a module, such as
        ``"model.layers.3.self_attn.q_proj"``; None joins both by dots.

    Returns:
      ``base_model.model.<name>.lora_A.weight`` (rank, rows) and ``lora_B.weight`` (columns, rank).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from sharding import stored
      >>> params = {"layer": {"w": jnp.ones((64, 32))}}
      >>> params = stored.store(params, {"w": stored.lora(2)}, jax.random.key(0))
      >>> {name: x.shape for name, x in stored.peft(params).items()}
      {'base_model.model.layer.w.lora_A.weight': (2, 64),
       'base_model.model.layer.w.lora_B.weight': (32, 2)}
    """
    found = {}
    for name, index, form in _modules(params, name_of):
        a, b = np.asarray(form.a[index]), np.asarray(form.b[index])
        found[f"base_model.model.{name}.lora_A.weight"] = a.reshape(-1, form.rank).T
        found[f"base_model.model.{name}.lora_B.weight"] = b.reshape(form.rank, -1).T
    return found


def peft_config(
    params: Tree, name_of: Callable[[str, tuple[int, ...]], str] | None = None
) -> dict[str, Any]:
    """What ``adapter_config.json`` says beside the arrays of ``peft``: ranks, alphas, modules.

    Args:
      params: parameters, of which some are adapted.
      name_of: as of ``peft``.

    Returns:
      The rank and alpha of most modules, and those of the others by their names.

    Raises:
      ValueError: if no parameter is adapted.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from sharding import stored
      >>> params = {"v": jnp.ones((64, 32)), "w": jnp.ones((64, 32))}
      >>> params = stored.store(params, {"v|w": stored.lora(2, alpha=8)}, jax.random.key(0))
      >>> config = stored.peft_config(params)
      >>> config["r"], config["lora_alpha"], config["target_modules"], config["rank_pattern"]
      (2, 8.0, ['v', 'w'], {})
    """
    modules = {name: form for name, _, form in _modules(params, name_of)}
    if not modules:
        raise ValueError("peft_config: no parameter is adapted, as by store with lora(rank).")
    ranks = {name: form.rank for name, form in modules.items()}
    alphas = {name: form.scale * form.rank for name, form in modules.items()}
    rank, alpha = (Counter(of.values()).most_common(1)[0][0] for of in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        "rank_pattern": {name: x for name, x in ranks.items() if x != rank},
        "alpha_pattern": {name: x for name, x in alphas.items() if x != alpha},
    }


def _modules(
    params: Tree, name_of: Callable[[str, Index], str] | None
) -> Iterator[tuple[str, Index, Adapted]]:
    """The name of each adapted array, its index in its stack, and the form."""
    for path, form in adapters(params).items():
        for index in np.ndindex(*form.shape[: form.stacked]):
            name = ".".join([*path.split("/"), *map(str, index)])
            yield (name if name_of is None else name_of(path, index)), index, form
