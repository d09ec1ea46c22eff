"""GPT-2 small on the same text: what is run, and the table of loss, speed and memory."""

import math
from collections.abc import Iterator, Mapping

import _lengths
import _search
import _sizes
import _studies
from _every import EVERY
from _rows import Row, key_of
from _tables import table

CONTENDERS = ("adamw", "came_debiased", "adafactor_momentum", "came_debiased_8bit")
EXPONENTS = (-3.0, -3.25, -2.75)  # of the learning rate; all contenders at one before the next
SEED = 1

Rows = Mapping[str, Row]


def config(size: str, contender: str, exponent: float) -> _lengths.Config:
    """A run, with weight decay and betas from which the searches of the small model start."""
    one = EVERY[contender]
    betas = tuple(_lengths.betas_of(contender)[0].items())
    trial = _search.Trial(exponent, one.weight_decays[0], betas)
    return _sizes.config(size, "next_token", contender, SEED, trial.hyper)


def plans(rows: Rows, size: str) -> Iterator[_studies.Plan]:
    """In the order of work: every contender has a run before any has a second one."""
    for exponent in EXPONENTS:
        for contender in CONTENDERS:
            one = config(size, contender, exponent)
            done = key_of(one) in rows
            name = f"{contender} at 1e{exponent:g}"
            yield _studies.Plan(name, 1, int(done), [] if done else [one])


def lines(rows: Rows, size: str) -> Iterator[list[str]]:
    """One for each contender with a run, at its best learning rate."""
    for contender in CONTENDERS:
        configs = [config(size, contender, exponent) for exponent in EXPONENTS]
        there = [rows[key_of(one)] for one in configs if key_of(one) in rows]
        if not there:
            continue
        best = min(there, key=lambda row: math.inf if row["diverged"] else row["loss"])
        rate = f"{best['config']['hyper']['learning_rate']:g}"
        losses = ", ".join(
            f"{row['config']['hyper']['learning_rate']:g}: {_loss(row)}" for row in there
        )
        speed, peak = best["tokens_per_second"], best["peak_bytes"]
        yield [
            f"`{contender}`",
            _loss(best),
            rate,
            losses,
            f"{len(there)} of {len(EXPONENTS)}",
            "-" if speed is None else f"{speed:,.0f}",
            "-" if peak is None else f"{peak / 2**30:.2f}",
            f"{best['state_bytes'] / 2**30:.2f}",
        ]


def report(rows: Rows, size: str) -> str:
    """The table, and what is missing."""
    header = ["contender", "validation loss", "at learning rate", "all learning rates", "runs"]
    header += ["tokens/s", "peak memory, GiB", "optimizer state, GiB"]
    todo = [plan.name for plan in plans(rows, size) if not plan.done]
    missing = f"**Not there yet**: {', '.join(todo)}." if todo else ""
    return "\n\n".join(part for part in (table(header, lines(rows, size)), missing) if part)


def _loss(row: Row) -> str:
    return "diverged" if row["diverged"] else f"{row['loss']:.3f}"
