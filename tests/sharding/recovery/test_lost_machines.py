"""Processes that are killed at every point of a save, with and without the memory of a machine.

After each kill all processes start again, restore what the machines hold, and go on. The losses
are those of a run without kills, bit by bit, and nothing older than the last committed step is
restored. Each promise has a test in one process as well, in ``test_peer_checkpoints.py`` and
``test_find_snapshot.py``. ``RECOVERY_KILLS`` sets how many kills there are.
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

pytestmark = pytest.mark.script
PROCESSES = 4
MACHINES = ["a", "b", "c", "d"]
# Where a process is killed: before it calls save, before and after the program, when the older slot
# is cleared, while it writes its own and its peer's shards, before and within the header, after it.
POINTS = ("training", "send", "sent", "cleared", "own", "peer", "data", "header", "between")
KILLS = int(os.environ.get("RECOVERY_KILLS", len(POINTS)))


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
        options = {"machines": MACHINES, "port": port, "steps": steps} | options
        options |= {"root": str(self.root), "log": str(self.log)}
        self._server.stdin.write(json.dumps(options) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def train(self, steps, **options):
        codes = self.run(steps, **options)
        assert not any(codes), self.output()

    def kill(self, rank, point, step, *, lost=False, **options):
        """A run in which a process is killed; its machine is lost as well."""
        codes = self.run(step + 3, kill=[rank, point, step], **options)
        assert codes[rank] == -9, self.output()
        if lost:
            shutil.rmtree(self.root / MACHINES[rank])

    def rows(self, key, rank=0):
        found = map(json.loads, (self.log / f"rows-{rank}.jsonl").read_text().splitlines())
        return [row for row in found if key in row]

    def restored(self):
        """The step that all processes restored last, and how often they did."""
        last = {self.rows("restored", rank)[-1]["restored"] for rank in range(PROCESSES)}
        assert len(last) == 1, last
        return last.pop()

    def losses(self):
        """The losses of each step, as often as it was taken."""
        found = {}
        for row in self.rows("step"):
            found.setdefault(row["step"], set()).add(row["loss"])
        return found

    def committed(self):
        """The last step that all processes committed."""
        last = [max(map(int, path.read_text().split())) for path in self.log.glob("committed-*")]
        return min(last) if len(last) == PROCESSES else 0

    def output(self):
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
    cluster = Cluster(tmp_path_factory.mktemp("unbroken"), server)
    cluster.train(3 * KILLS + 12)
    return cluster.losses()


def check_losses(cluster, unbroken):
    """Every step of every attempt has the loss of the unbroken run."""
    assert cluster.losses()
    for step, losses in cluster.losses().items():
        assert losses == unbroken[step], step


def test_killed_at_every_point(cluster, unbroken):
    """One kill after the other in one run, each second one with the memory of its machine."""
    rng = np.random.default_rng(0)
    for i in range(KILLS):
        point, lost = POINTS[i % len(POINTS)], (i + i // len(POINTS)) % 2
        rank, before = int(rng.integers(PROCESSES)), cluster.committed()
        step = before + 2
        cluster.kill(rank, point, step, lost=lost, must_restore=i > 0)
        # Two slots hold what was committed, or the one before it.
        assert cluster.restored() >= before, (point, lost)
        assert cluster.committed() >= step - 2, point
    committed = cluster.committed()
    cluster.train(committed + 2, must_restore=True)
    assert cluster.restored() >= committed
    check_losses(cluster, unbroken)


def test_killed_while_restoring(cluster, unbroken):
    """Lost again before redundancy is back: in the restore, and while replicas are written anew."""
    cluster.train(4)
    shutil.rmtree(cluster.root / "b")
    cluster.kill(1, "load", 0, must_restore=True)  # the machine of b is empty still
    cluster.kill(0, "own", 4, must_restore=True)
    assert cluster.restored() == 4
    cluster.kill(2, "peer", 4, lost=True, must_restore=True)  # of another group
    assert cluster.restored() == 4
    cluster.train(6, must_restore=True)
    assert cluster.restored() == 4
    check_losses(cluster, unbroken)


def test_copies_in_steps(cluster, tmp_path, server):
    """The training step copies; a kill may find a snapshot that no step has taken.

    Losses are those of the same program: with copies, XLA fuses a step in another way.
    """
    (tmp_path / "control").mkdir()
    control = Cluster(tmp_path / "control", server)
    control.train(6, in_step=True)
    cluster.kill(1, "send", 3, in_step=True)
    assert cluster.committed() in (1, 2)
    cluster.kill(2, "peer", 4, lost=True, in_step=True, must_restore=True)
    assert cluster.restored() in (1, 2)
    cluster.train(6, in_step=True, must_restore=True)
    assert cluster.restored() in (3, 4)
    check_losses(cluster, control.losses())
