"""Checks of checkpoints: what is saved comes back bit for bit."""

import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from sharding._zero import Zero
from sharding.check._check_steps import initial_params
from sharding.check._machine_report import MachineCheck, NotHere
from sharding.recovery._machines import find_machines, gather_json
from sharding.recovery._peer_checkpoints import PeerCheckpoints


def save_checks(folder: str | os.PathLike[str] | None) -> Iterator[MachineCheck]:
    """Of peers' memory, and of a folder that all processes see, if one is given."""
    yield MachineCheck(
        "saves: a snapshot in memory of peers",
        _compare_peers,
        "PeerCheckpoints",
        "checkpoints by orbax",
    )
    yield MachineCheck(
        "saves: a checkpoint by orbax",
        functools.partial(_compare_orbax, folder),
        "checkpoints in that folder",
        "another folder, or PeerCheckpoints",
    )


def _state_to_save() -> tuple[Zero, Any]:
    tx = optax.adam(1)
    zero = Zero(jax.make_mesh((jax.device_count(),), ("data",)), 3, min_shard_size=1)
    return zero, zero.init(lambda: (params := initial_params(), tx.init(params)), tx=tx)


def _lost_arrays(have: Any, want: Any) -> float:
    """How many arrays of this process have other bits."""
    return float(
        sum(
            not np.array_equal(a.data, b.data)
            for x, y in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True)
            for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)
        )
    )


def _compare_peers() -> float:
    """In two machines' memory, if there are two; all processes of a machine have one folder."""
    zero, state = _state_to_save()
    mesh = cast(Mesh, zero.mesh)
    machines = len(find_machines(mesh, None, None).names)
    memory = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else tempfile.gettempdir()
    run = f"optax-ext-check-{gather_json(os.getpid())[0]}"
    store = PeerCheckpoints(mesh, memory, run_id=run, replicas=min(2, machines))
    try:
        store.save(1, state)
        store.wait_until_finished()
        return _lost_arrays(store.restore(state).state, state)
    finally:
        store.close(delete=True)
        gather_json(0)  # others may still read
        shutil.rmtree(store.folder, ignore_errors=True)


def _compare_orbax(folder: str | os.PathLike[str] | None) -> float:
    if folder is None:
        raise NotHere("no folder was given: --folder")
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise NotHere("orbax is not installed: pip install orbax-checkpoint") from None
    _, state = _state_to_save()
    path = pathlib.Path(folder).absolute() / "optax-ext-check"
    with ocp.StandardCheckpointer() as store:
        store.save(path, state, force=True)
        store.wait_until_finished()
        types = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        found = _lost_arrays(store.restore(path, types), state)
    if jax.process_index() == 0:
        shutil.rmtree(path)
    return found
