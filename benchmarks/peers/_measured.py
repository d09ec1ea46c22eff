"""What is measured alike in every library's process; imports nothing of any."""

import inspect
import pathlib
from typing import Any

PASSED = 2  # first steps, which compile or warm up, and are not measured


def sent() -> int:
    """Bytes sent over the loopback interface so far, by all processes of this network namespace."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split()[9])


def lines_of(user_code: Any) -> int:
    """Lines of a function without its first, docstrings, empty lines and imports."""
    lines = map(str.strip, inspect.getsource(user_code).splitlines()[1:])
    skipped = ("import", "from", '"""')
    return sum(line != "" and not line.startswith(skipped) for line in lines)
