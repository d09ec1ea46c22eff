"""Many processes of train_lm.py: how they meet, what they agree on, how they end."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

# A process that gives no sign of life for so many seconds is lost, and the others end.
LOST_AFTER = 30


def join() -> None:
    """Meets the other processes; the cluster's environment says where and how many they are."""
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=LOST_AFTER, shutdown_timeout_seconds=LOST_AFTER
        )
    except ValueError as error:
        raise OSError(
            f"--distributed found no cluster ({error}): launch/README.md tells how to start it"
        ) from error


def is_main() -> bool:
    """Whether this is the process that prints and writes; checkpoints are written by all."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns when all processes have come here."""
    multihost_utils.sync_global_devices(name)


def my_rows(batch: np.ndarray) -> np.ndarray:
    """This process's part of a batch that all processes know."""
    return np.split(batch, jax.process_count())[jax.process_index()]


def any_stop(stop: list[int]) -> bool:
    """Whether any process was told to stop, the same on all; ``stop`` gets the signal's number.

    Each step asks, for where one process stops all must: the next step would wait for it. JAX's
    ``reached_preemption_sync_point`` asks for less, a microsecond instead of a millisecond, but
    misses Ctrl-C, and a SIGTERM that comes before the first step of a resumed run.
    """
    if jax.process_count() == 1:
        return bool(stop)
    number = int(multihost_utils.process_allgather(np.int32(stop[0] if stop else 0)).max())
    if number and not stop:
        stop.append(number)
    return number > 0


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Ends this process at once on an error, so that the others do not wait for it.

    Where the loss of a process shows as an error here, as with CPU devices, this says so. Where a
    collective hangs instead, JAX aborts the process after ``LOST_AFTER`` seconds, with its words.
    """
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        cause = "most likely because another one was lost"
        if not isinstance(error, jax.errors.JaxRuntimeError):
            cause = "at a failure of its own"
            traceback.print_exc()
        print(
            f"train_lm.py: error: process {jax.process_index()} of {jax.process_count()} ends, "
            f"{cause} ({str(error).partition(chr(10))[0]}). The same command, on as many processes "
            "or fewer, goes on from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        if is_main():
            time.sleep(1)  # JAX aborts the others when this one ends: let them speak first
        os._exit(1)
