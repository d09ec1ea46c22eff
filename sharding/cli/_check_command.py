"""The command ``check``: every feature on the devices of this machine; or their rates."""

import json
import pathlib
import sys
from argparse import Namespace

import jax

from sharding.check._check_machine import check_machine
from sharding.check._machine_report import Outcome
from sharding.check._measure_machine import measure_machine
from sharding.cli._output import writing
from sharding.plan._format import show


def run_check(options: Namespace) -> int:
    """Prints what differs, 1 if something does; or measures."""
    if options.measure:
        return _write_rates(options)

    def progress(found: Outcome) -> None:
        if not options.json and jax.process_index() == 0:
            print(f"{found.status:>8}  {found.name} ({found.seconds:.1f} s)", file=sys.stderr)

    report = check_machine(folder=options.folder, match=options.match or "", progress=progress)
    if jax.process_index() == 0:
        if options.json:
            print(json.dumps(report.to_dict(), indent=1))
        else:
            show(report.tables(), report.sentences)
    return int(not report.ok)


def _write_rates(options: Namespace) -> int:
    """Prints rates, and writes them."""
    is_first = jax.process_index() == 0
    if not pathlib.Path(options.measure).absolute().parent.is_dir():
        raise ValueError(f"{options.measure} cannot be written: there is no such folder.")

    def progress(text: str) -> None:
        if not options.json and is_first:
            print(f"measuring {text}", file=sys.stderr)

    rates = measure_machine(progress)
    if is_first:
        with writing("--measure", options.measure):
            rates.write(options.measure)
        print(json.dumps(rates.to_dict(), indent=1) if options.json else rates)
    return 0
