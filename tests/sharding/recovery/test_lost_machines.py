"""Processes that are killed at every point of a save, with and without the memory of a machine.

After each kill all processes start again, restore what the machines hold, and go on. The losses
are those of a run without kills, bit by bit, and nothing older than the last committed step is
restored.
``RECOVERY_KILLS`` sets how many kills there are.
"""

import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from ...multiprocess.processes import ROOT
from . import trainer

PROCESSES = 4
EACH = ["a", "b", "c", "d"]
# Where a process is killed: before it calls save, before and after the program, when the older slot
# is cleared, while it writes its own and its peer's shards, before and within the header, after it.
POINTS = ("training", "send", "sent", "cleared", "own", "peer", "data", "header", "between")
KILLS = int(os.environ.get("RECOVERY_KILLS", "14"))


class Cluster:
    """Runs of ``trainer``, with one folder in memory for each machine."""

    def __init__(self, folder, server):
        self.root, self.log, self._server = folder / "memory", folder / "log", server
        self.root.mkdir()
        self.log.mkdir()

    def run(self, steps, **options):
        """Starts all processes, which train up to a step unless one is killed; their exit codes."""
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        options = {"mesh": [8], "stage": 3, "machines": EACH, "processes": PROCESSES} | options
        options |= {"steps": steps, "root": str(self.root), "log": str(self.log), "port": port}
        self._server.stdin.write(json.dumps(options) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def lose(self, machine):
        """The memory of a machine is gone."""
        shutil.rmtree(self.root / machine, ignore_errors=True)

    def rows(self, key):
        """The rows of the log that have a key."""
        path = self.log / "losses.jsonl"
        found = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
        return [row for row in found if key in row]

    def losses(self):
        """The losses of each step, as often as it was taken."""
        found = {}
        for row in self.rows("step"):
            found.setdefault(row["step"], set()).add(row["loss"])
        return found

    def committed(self):
        """The last step that all processes committed."""
        last = []
        for path in sorted(self.log.glob("committed-*.txt")):
            last.append(max(map(int, path.read_text().split()), default=0))
        return min(last) if len(last) == PROCESSES else 0

    def output(self):
        """What the processes printed."""
        return "".join(path.read_text() for path in sorted(self.log.glob("output-*.txt")))


@pytest.fixture(scope="module")
def server():
    """Forks processes whose imports are done."""
    module = trainer.__name__[trainer.__name__.index("tests.") :]
    with subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def cluster(tmp_path, server):
    return Cluster(tmp_path, server)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, server):
    """The losses of a run that nothing disturbs."""
    cluster = Cluster(tmp_path_factory.mktemp("unbroken"), server)
    codes = cluster.run(2 * KILLS + 10)
    assert codes == [0] * PROCESSES, cluster.output()
    return cluster.losses()


def check_losses(cluster, unbroken):
    """Every step of every attempt has the loss of the unbroken run."""
    for step, losses in cluster.losses().items():
        assert losses == unbroken[step], step


def test_killed_at_every_point(cluster, unbroken):
    """One kill after the other in one run, each second one with the memory of its machine."""
    rng = np.random.default_rng(0)
    for i in range(KILLS):
        point, lost = POINTS[i // 2 % len(POINTS)], i % 2
        rank, before = int(rng.integers(PROCESSES)), cluster.committed()
        step = before + 2
        codes = cluster.run(step + 2, kill=[rank, point, step], must_restore=i > 0)
        assert codes[rank] != 0, (point, cluster.output())
        committed = cluster.committed()
        if lost:
            cluster.lose(EACH[rank])
        restored = cluster.rows("restored")
        assert len(restored) == i + 1, (point, cluster.output())
        assert restored[-1]["restored"] >= before, (point, lost)
        assert committed >= step - 2
    codes = cluster.run(2 * KILLS + 10, must_restore=True)
    assert codes == [0] * PROCESSES, cluster.output()
    assert cluster.rows("restored")[-1]["restored"] >= committed
    assert max(cluster.losses()) == 2 * KILLS + 10
    check_losses(cluster, unbroken)
