"""Runs a training script again when it fails, so that this machine's memory outlives its processes.

The script resumes by itself, as train_lm.py does from the memory of machines or from disk. A stop
by SIGTERM or Ctrl-C is passed on and final, and so are success and a mistake in the command (exit
code 2). Start one on each machine, or in each pod; when one script fails, those of the other
machines end by themselves (train_lm.py within 40 seconds), and all start again.

  python examples/supervise.py python examples/train_lm.py --smoke --peer-checkpoints --name watched
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

FINAL = (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM)

parser = argparse.ArgumentParser(usage="%(prog)s [--restarts N] [--delay SECONDS] COMMAND ...")
parser.add_argument("--restarts", type=int, default=100, metavar="N", help="[%(default)s]")
parser.add_argument("--delay", type=float, default=1.0, metavar="SECONDS", help="[%(default)s]")
parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
options = parser.parse_args()
if not options.command:
    parser.error("no COMMAND to run.")

stopped, child = [], None


def stop(number, _):
    """Passes a signal on."""
    stopped.append(number)
    if child is not None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
for attempt in range(options.restarts + 1):
    child = subprocess.Popen(options.command, start_new_session=True)
    code = child.wait()
    # What it started must not hold its devices. SIGKILL: JAX catches SIGTERM.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    code = 128 - code if code < 0 else code
    if stopped or code in FINAL or attempt == options.restarts:
        sys.exit(code)
    print(
        f"supervise.py: exit code {code}; restart {attempt + 1} of {options.restarts}.",
        file=sys.stderr,
        flush=True,
    )
    time.sleep(options.delay)
