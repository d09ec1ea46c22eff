"""From forms back to arrays, or to other codes; adapters as peft reads them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sharding._types import Tree
from sharding.stored._files import Index
from sharding.stored._forms import Adapted, Form, at_index, decoded, is_form
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
            adapted = jax.device_get(leaves[i])
            leaves[i] = to(adapted, path, None)
            errors[path] = _relative_error(leaves[i], adapted)
    return treedef.unflatten(leaves), errors


def _relative_error(found: Form, exact: Form) -> float:
    squares = np.zeros(2)
    for index in np.ndindex(*exact.shape[: min(found.stacked, exact.stacked)]):
        both = (at_index(form, index).decode() for form in (found, exact))
        new, old = (np.asarray(w, np.float64) for w in both)
        squares += [np.sum((new - old) ** 2), np.sum(old**2)]
    return float(np.sqrt(squares[0] / squares[1])) if squares[0] else 0.0


def peft(
    params: Tree, name_of: Callable[[str, Index], str] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Adapters as Hugging Face's peft reads them.

    Args:
      params: parameters, of which some are adapted.
      name_of: from a path and an index in its stack to the name of a module, such as
        ``"model.layers.3.self_attn.q_proj"``; None joins both by dots.

    Returns:
      The arrays of ``adapter_model.safetensors`` by their names, such as
      ``base_model.model.<module>.lora_A.weight`` (rank, rows), and what ``adapter_config.json``
      says: rank and alpha of most modules, and those of the others by their names.

    Raises:
      ValueError: if no parameter is adapted, or some with DoRA and others without.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from sharding import stored
      >>> params = {"v": jnp.ones((64, 32)), "w": jnp.ones((64, 32))}
      >>> params = stored.store(params, {"v|w": stored.lora(2, alpha=8)}, jax.random.key(0))
      >>> arrays, config = stored.peft(params)
      >>> {name: x.shape for name, x in arrays.items() if ".w." in name}
      {'base_model.model.w.lora_A.weight': (2, 64), 'base_model.model.w.lora_B.weight': (32, 2)}
      >>> config["r"], config["lora_alpha"], config["target_modules"], config["rank_pattern"]
      (2, 8.0, ['v', 'w'], {})
    """
    arrays: dict[str, np.ndarray] = {}
    modules: dict[str, Adapted] = {}
    named = zip(paths_of(params), jax.tree.leaves(params, is_leaf=is_form), strict=True)
    adapted = [(path, x) for path, x in named if isinstance(x, Adapted)]
    with_dora = {x.magnitude is not None for _, x in adapted}
    if len(with_dora) != 1:
        found = "both are there" if adapted else "no parameter is adapted"
        raise ValueError(f"peft takes adapters that all have DoRA, or none, and {found}.")
    for path, form in adapted:
        for index in np.ndindex(*form.shape[: form.stacked]):
            joined = ".".join([*path.split("/"), *map(str, index)])
            module = joined if name_of is None else name_of(path, index)
            modules[module] = form
            start = f"base_model.model.{module}.lora_"
            arrays[f"{start}A.weight"] = np.asarray(form.a[index]).reshape(-1, form.rank).T
            arrays[f"{start}B.weight"] = np.asarray(form.b[index]).reshape(form.rank, -1).T
            if form.magnitude is not None:
                arrays[f"{start}magnitude_vector"] = np.asarray(form.magnitude[index]).reshape(-1)
    ranks = {name: form.rank for name, form in modules.items()}
    alphas = {name: form.scale * form.rank for name, form in modules.items()}
    rank, alpha = (Counter(of.values()).most_common(1)[0][0] for of in (ranks, alphas))
    return arrays, {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "use_dora": with_dora == {True},
        "target_modules": sorted(modules),
        "rank_pattern": {name: x for name, x in ranks.items() if x != rank},
        "alpha_pattern": {name: x for name, x in alphas.items() if x != alpha},
    }
