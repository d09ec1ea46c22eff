"""Running train_lm.py as many processes: joining, agreeing to stop, ending together."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

# Seconds without a heartbeat after which a process counts as lost, and the others end.
LOST_AFTER = 30


def join() -> None:
    """Joins the other processes, which JAX finds through the cluster's environment."""
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=LOST_AFTER, shutdown_timeout_seconds=LOST_AFTER
        )
    except ValueError as error:
        raise OSError(
            f"--distributed found no cluster ({error}). See launch/README.md for how to start one."
        ) from error


def is_main() -> bool:
    """Whether this process prints and writes files; all processes write checkpoints."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns once all processes have called this."""
    multihost_utils.sync_global_devices(name)


def any_stop(stop: list[int]) -> bool:
    """Whether any process received a stop signal, agreed by all; ``stop`` gets its number.

    Called in every step: once one process stops, the next step of the others would wait forever.
    JAX's ``reached_preemption_sync_point`` takes a microsecond instead of a millisecond, but misses
    Ctrl-C, and a SIGTERM before the first step of a resumed run.
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

    With CPU devices the loss of another process raises an error here, which is reported in one
    line. On platforms where collectives hang instead, JAX aborts this process after ``LOST_AFTER``
    seconds with a message of its own.
    """
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        cause = "most likely because another process was lost"
        # Where jax compiles or dispatches, the collective's error is a ValueError.
        if not isinstance(error, jax.errors.JaxRuntimeError) and "Gloo" not in str(error):
            cause = "because of an error of its own"
            traceback.print_exc()
        print(
            f"train_lm.py: error: process {jax.process_index()} of {jax.process_count()} ends, "
            f"{cause} ({str(error).partition(chr(10))[0]}). The same command, with as many "
            "processes or fewer, resumes from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        if is_main():
            time.sleep(1)  # JAX aborts the others when this one ends: let them print first
        os._exit(1)
