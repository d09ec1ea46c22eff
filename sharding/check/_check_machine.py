"""``check_machine``: every feature on the machine's own devices, beside a reference."""

import os
from collections.abc import Callable

from sharding.check._check_numbers import number_checks
from sharding.check._check_saves import save_checks
from sharding.check._check_steps import step_checks
from sharding.check._check_wire import wire_checks
from sharding.check._machine_report import MachineReport, Outcome, describe_machine, run_checks


def check_machine(
    *,
    folder: str | os.PathLike[str] | None = None,
    match: str = "",
    progress: Callable[[Outcome], object] = lambda found: None,
) -> MachineReport:
    """Runs every feature on the devices of this machine, and compares it with a reference.

    Small inputs: codes of all formats, stochastic rounding, updates of few-bit state, each form of
    each collective on a mesh of all devices, steps of all stages in both programs, host memory,
    plans of activations, pipelines, and saves. References are NumPy, or plain optax on a CPU of the
    same process. With several processes all of them call it, at the same time.

    Args:
      folder: where orbax saves a checkpoint and removes it; one that all processes see.
      match: only checks with this text in their name.
      progress: a function of each outcome, as soon as it is there.

    Returns:
      A report, ``ok`` if nothing differs: ``print`` shows what differs, what that affects, and what
      to switch off; ``to_dict()`` is ready for JSON.

    Raises:
      ValueError: if no check has ``match`` in its name.

    Example:
      >>> import sharding as shd
      >>> shd.check_machine(match="all-gather, float32").ok
      True
    """
    subjects = number_checks(), wire_checks(), step_checks(), save_checks(folder)
    chosen = [check for checks in subjects for check in checks if match in check.name]
    if not chosen:
        names = ", ".join(check.name for checks in subjects for check in checks)
        raise ValueError(f"no check has {match!r} in its name; there are {names}.")
    return MachineReport(describe_machine(), run_checks(chosen, progress))
