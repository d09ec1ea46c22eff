"""Warnings that point at the user's line that led to here."""

import functools
import inspect
import warnings

from optax_ext.user_line import is_users


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at the innermost line of the user's code that is being run."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


# Traces of other calls and steps have the same to say.
warn_once = functools.cache(warn)
