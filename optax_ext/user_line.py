"""The user's line that an equation is from: what errors and warnings name."""

import contextlib
import dataclasses
import functools
import os
import traceback
from typing import Any

import jax
import optax

_SITE = os.path.dirname(os.path.dirname(jax.__file__))
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FOLDERS = (
    *(os.path.join(_SITE, name) for name in ("jax", "jaxlib", "flax")),
    os.path.dirname(optax.__file__),
    *(os.path.join(_HERE, name) for name in ("optax_ext", "sharding")),
)
# Whose lines are not the user's.
_LIBRARIES = (
    *(folder + os.sep for folder in _FOLDERS),
    *(str(module.__file__) for module in (contextlib, dataclasses, functools)),
)


def is_users(filename: str) -> bool:
    """Whether a file is none of these packages or of what calls them."""
    return not filename.startswith(_LIBRARIES)


def line_of(source_info: Any) -> str:
    """The user's line that an equation is from, as ``file:number``; empty where there is none.

    Of what is installed, such as a layer of Equinox, the line that calls it.
    """
    trace = source_info and source_info.traceback
    frames = traceback.extract_tb(trace.as_python_traceback()) if trace else []
    own = [f for f in frames if is_users(f.filename)]
    own = [f for f in own if not f.filename.startswith(_SITE + os.sep)] or own
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
