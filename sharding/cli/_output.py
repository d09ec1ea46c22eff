"""Writes what a command found: as JSON, and into the files that its options name."""

import contextlib
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from sharding.plan._format import Printed, show


def show_or_json(options: Namespace, found: Printed) -> None:
    """Prints all figures as JSON if ``--json`` asks for it, else tables and sentences."""
    if options.json:
        print_json(found.to_dict())
    else:
        show(found.tables(), found.sentences)


def print_json(figures: dict[str, Any]) -> None:
    """Infinite figures, such as an unknown bandwidth, are null."""
    finite = json.loads(json.dumps(figures), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=1))


def save(plot: Callable[[Any], Any], figures: Any, path: str) -> None:
    with writing("--plot", path):
        plot(figures).savefig(path, dpi=150)


@contextlib.contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    """Names the option whose file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}.") from error
