"""Warnings that point at the user's line that led to here."""

import functools
import inspect
import types
import warnings

from optax_ext.user_line import is_users


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at the innermost line of the user's code that is being run."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and not _is_users(frame.f_code):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_users(code: types.CodeType) -> bool:
    """Not that of this package, nor the ``__init__`` that a dataclass of it got."""
    name = code.co_filename, code.co_name
    return is_users(code.co_filename) and name != ("<string>", "__init__")


# Traces of other calls and steps have the same to say.
warn_once = functools.cache(warn)
