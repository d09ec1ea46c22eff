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
EACH = ["a", "b", "c", "d"]
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
        options = {"mesh": [8], "stage": 3, "machines": EACH} | options
        options |= {"processes": len(options["machines"]), "port": port, "steps": steps}
        options |= {"root": str(self.root), "log": str(self.log)}
        self._server.stdin.write(json.dumps(options) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def train(self, steps, **options):
        """A run that ends well."""
        codes = self.run(steps, **options)
        assert not any(codes), self.output()

    def kill(self, rank, point, step, *, lost=False, **options):
        """A run in which a process is killed; its machine is lost as well."""
        codes = self.run(step + 3, kill=[rank, point, step], **options)
        assert codes[rank] == -9, self.output()
        if lost:
            self.lose(options.get("machines", EACH)[rank])

    def lose(self, *machines):
        """The memory of machines is gone."""
        for machine in machines:
            shutil.rmtree(self.root / machine, ignore_errors=True)

    def rows(self, key, rank=0):
        """What a process logged under a key."""
        path = self.log / f"rows-{rank}.jsonl"
        found = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
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
    cluster.lose("b")
    cluster.kill(1, "load", 0, must_restore=True)  # the machine of b is empty still
    cluster.kill(0, "own", 4, must_restore=True)
    assert cluster.restored() == 4
    cluster.kill(2, "peer", 4, lost=True, must_restore=True)  # of another group
    assert cluster.restored() == 4
    cluster.train(6, must_restore=True)
    assert cluster.restored() == 4
    check_losses(cluster, unbroken)


def test_group_lost(cluster, unbroken):
    """Both machines of a group are gone: the error names shards and step, training starts anew."""
    cluster.train(3)
    cluster.lose("c", "d")
    assert all(cluster.run(4, must_restore=True))
    assert "NoCompleteCheckpoint" in cluster.output()
    assert "step 3 has no intact replica of shards of ['train'][0]['" in cluster.output()
    cluster.train(4)
    assert cluster.restored() == 0
    check_losses(cluster, unbroken)


def test_machines_of_two_processes(cluster, unbroken):
    """A machine is lost with both of its processes; processes of a machine share its folder."""
    machines = ["a", "a", "b", "b"]
    cluster.kill(2, "own", 3, machines=machines)
    cluster.kill(3, "header", 5, lost=True, machines=machines, must_restore=True)
    cluster.train(6, machines=machines, must_restore=True)
    assert cluster.restored() >= 3
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


def test_slow_writers(cluster, unbroken):
    """No process overwrites the last complete snapshot while others still write the one after it.

    If they did not wait for the token, the kill of one process would lose all, and no machine is
    lost: a and b have not written step 3 yet, c and d have cleared step 2.
    """
    slow = {"0": {"3": 4.0}, "1": {"3": 4.0}}
    cluster.kill(2, "cleared", 4, slow=slow, survive=1.5)
    assert cluster.output().count("until the snapshot before was written") == 2  # of a and b
    cluster.train(5)
    assert cluster.restored() in (3, 4)
    check_losses(cluster, unbroken)


def test_memory_full(cluster, unbroken):
    """Training goes on; the last complete snapshot stays, and is restored.

    If the token did not say who failed to write, the others would overwrite it.
    """
    cluster.kill(2, "training", 6, full={"0": [4, 5], "1": [4, 5]})
    assert "snapshot of step 4 was not written" in cluster.output()
    cluster.train(7, full={"3": [6]})
    assert cluster.restored() == 3
    (counts,) = (row["counts"] for row in cluster.rows("counts", 3))
    assert (counts["failed"], counts["saved"]) == (1, 4)  # 3 again, 4, 5 and 7
    check_losses(cluster, unbroken)


@pytest.mark.parametrize(
    "options",
    [
        {"placement": "ring", "stage": 1},
        {"interval": 3, "stage": 2},
        {"mesh": [2, 4], "stage": 3},  # replicas on devices: nothing is sent
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_other_configurations(cluster, options):
    """The coordinator's machine is lost."""
    cluster.kill(0, "training", 6, lost=True, **options)
    cluster.train(9, must_restore=True, **options)
    assert cluster.restored() == {3: 3}.get(options.get("interval"), 5)
    assert all(len(losses) == 1 for losses in cluster.losses().values())


def test_elastic(cluster, unbroken):
    """On other devices and processes: bit-equal on as many devices, else to rounding."""
    cluster.train(4)
    cluster.lose("b", "c")  # of different groups
    for mesh, steps in ([8], 6), ([4], 8):  # two processes of four devices, then of two
        cluster.train(steps, machines=["a", "d"], mesh=mesh, must_restore=True)
        assert cluster.rows("restored")[-1]["restored"] == steps - 2
    losses = cluster.losses()
    for step in range(1, 9):
        (found,), (expected,) = losses[step], unbroken[step]
        if step <= 6:
            assert found == expected
        np.testing.assert_allclose(float.fromhex(found), float.fromhex(expected), rtol=1e-5)
