"""The user's line that led to here: where warnings point, and what they name."""

import contextlib
import functools
import inspect
import os
import traceback
import warnings
from typing import Any

import jax
import optax

_SITE = os.path.dirname(os.path.dirname(jax.__file__))
_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDERS = (
    *(os.path.join(_SITE, name) for name in ("jax", "jaxlib", "flax")),
    *(os.path.dirname(optax.__file__), _HERE, os.path.join(os.path.dirname(_HERE), "optax_ext")),
)
# Whose lines are not the user's.
_LIBRARIES = (
    *(folder + os.sep for folder in _FOLDERS),
    *(str(module.__file__) for module in (contextlib, functools)),
)


def is_users(filename: str) -> bool:
    """Whether a file is none of these packages or of what calls them."""
    return not filename.startswith(_LIBRARIES)


def line_of(source_info: Any) -> str:
    """The user's line that an equation is from, as ``file:number``; empty where there is none."""
    trace = source_info and source_info.traceback
    frames = traceback.extract_tb(trace.as_python_traceback()) if trace else []
    own = [f for f in frames if is_users(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def warn(message: str) -> None:
    """Issues a ``UserWarning`` at the innermost line of the user's code that is being run."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
