"""Processes with a network between them whose bandwidth is limited; Linux, root, iproute2.

Each process has a network namespace, joined by a pair of virtual Ethernet devices to a bridge in
one more; token buckets (``tc``'s tbf) at both ends limit what it sends and receives.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

BURST = 2**17  # bytes that pass at once: little, but more than the kernel's largest packet
_QUEUE = 2**24  # bytes that wait; so many that none are dropped
DEVICE = "eth0"  # of each process


def check() -> None:
    """Ends the program where a user cannot make networks."""
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if sys.platform != "linux" or missing or os.geteuid():
        found = f"{', '.join(missing)} missing" if missing else f"user {os.getuid()}"
        raise SystemExit(f"Limiting bandwidth needs Linux, root and iproute2; found {found}.")


def address(i: int) -> str:
    """Of a process, in its namespace."""
    return f"10.0.0.{i + 1}"


@contextlib.contextmanager
def network(num: int, gbits: float | None) -> Iterator[Callable[[int], list[str]]]:
    """Namespaces for so many processes, gone afterwards; what runs in them must have ended.

    Args:
      num: how many.
      gbits: what each may send, and be sent, in Gbit/s; None for no limit.

    Yields:
      ``prefix(i)``, which makes any command run in namespace i.
    """
    prefix = f"optax-ext-{os.getpid()}-"
    names = [f"{prefix}{i}" for i in range(num)]
    hub = f"{prefix}hub"
    try:
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", hub, "link", "add", "name", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            end = f"veth{i}"
            peer = ["type", "veth", "peer", "name", DEVICE, "netns", name]
            _run("ip", "-n", hub, "link", "add", "name", end, *peer)
            _run("ip", "-n", hub, "link", "set", end, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{address(i)}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if gbits is not None:
                rate = f"rate {round(gbits * 1e9)}bit burst {BURST}b limit {_QUEUE}b".split()
                for space, device in ((hub, end), (name, DEVICE)):
                    _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *rate)
        # gloo listens where the host's name leads; an address leads to itself.
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        yield lambda i: ["ip", "netns", "exec", names[i], *named, address(i)]
    finally:
        for line in _run("ip", "netns", "list").splitlines():
            if line.startswith(prefix):
                _run("ip", "netns", "delete", line.split()[0])


def run_all(commands: list[list[str]], folder: pathlib.Path, seconds: float) -> None:
    """Runs commands side by side until all have ended well; kills what still runs at any end.

    Raises:
      SystemExit: one failed, with the end of what it said; or they took too long.
    """
    started = []
    try:
        for i, command in enumerate(commands):
            with (folder / f"{i}.txt").open("w") as log:
                started.append(
                    subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
                )
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in started):
            for i, process in enumerate(started):
                if process.poll():
                    said = (folder / f"{i}.txt").read_text(errors="replace")
                    raise SystemExit(f"{said[-2000:]}\nProcess {i} failed: {process.returncode}.")
            if time.monotonic() > end:
                raise SystemExit(f"Processes still ran after {seconds} seconds.")
            time.sleep(0.1)
        if any(process.returncode for process in started):
            raise SystemExit(f"Processes failed: {[process.returncode for process in started]}.")
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def bytes_sent() -> int:
    """What this process's namespace has sent, with all headers."""
    return int(pathlib.Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


def _run(*command: str) -> str:
    """Runs a command; what it printed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
