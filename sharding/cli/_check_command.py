"""The command ``check``: every feature on the devices of this machine."""

import json
import sys
from argparse import Namespace

import jax

from sharding.check._check_machine import check_machine
from sharding.check._machine_report import Outcome
from sharding.plan._format import show


def run_check(options: Namespace) -> int:
    """Prints what differs; 1 if something does."""

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
