"""Writes what a command found: as JSON, and into the files that its options name."""

import contextlib
import json
import math
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import jax

from sharding.stored._forms import is_form

_VERSION = 1  # of the form of ``--json``


def print_json(
    options: Namespace,
    found: dict[str, Any],
    *,
    params: Any = None,
    sequences: int | None = None,
    length: int | None = None,
) -> None:
    """A ``document`` with what was asked; infinite figures, as unknown bandwidths, are null."""
    step = getattr(options, "step", None)
    arrays = jax.tree.leaves(params, is_leaf=is_form)
    model: dict[str, Any] = {"name": step or options.model}
    model |= {"num_params": sum(math.prod(x.shape) for x in arrays) if arrays else None}
    model |= {"optimizer": None if step else options.optimizer, "length": length or None}
    figures = {"version": _VERSION, "command": options.command, "model": model}
    figures |= {"sequences": sequences, **found}
    figures["machine"] = {"target": options.target} | figures["machine"]
    finite = json.loads(json.dumps(figures), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=1))


@contextlib.contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    """Names the option whose file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}.") from error
