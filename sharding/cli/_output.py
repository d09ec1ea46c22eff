"""The output of both commands: JSON and pictures."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any


def print_json(figures: dict[str, Any]) -> None:
    """Infinite figures, such as an unknown bandwidth, are null."""
    finite = json.loads(json.dumps(figures), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=1))


def save(plot: Callable[[Any], Any], figures: Any, path: str) -> None:
    """Writes the picture that ``plot`` makes."""
    with writing("--plot", path):
        plot(figures).savefig(path, dpi=150)


@contextlib.contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    """Names the option whose file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}.") from error
