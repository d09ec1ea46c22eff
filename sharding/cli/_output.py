"""The output of both commands: JSON and pictures."""

import json
from collections.abc import Callable
from typing import Any


def print_json(figures: dict[str, Any]) -> None:
    """Infinite figures, such as an unknown bandwidth, are null."""
    finite = json.loads(json.dumps(figures), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=1))


def save(plot: Callable[[Any], Any], figures: Any, path: str) -> None:
    """Writes the picture that ``plot`` makes."""
    try:
        plot(figures).savefig(path, dpi=150)
    except OSError as error:
        raise ValueError(f"--plot {path}: {error.strerror}.") from error
