"""The table of whole systems: what is lossless is held to its reference."""

import numpy as np
import whole_systems
from whole_systems import SYSTEMS, Outcome


def outcome(losses, **summary):
    sizes = {"bytes_per_device": {"params": 1024, "opt_state": 2048}, "wire_bytes": 4096.0}
    return Outcome({"val_loss": losses[-1], **sizes, **summary}, np.array(losses))


def made_up(changes=()):
    """All systems with the same losses, but for these."""
    losses = [4.0 - 0.01 * i for i in range(40)]
    return {name: outcome(dict(changes).get(name, losses)) for name in SYSTEMS}


def test_references_come_first_and_have_the_same_optimizer_where_lossless():
    names = list(SYSTEMS)
    for name, system in SYSTEMS.items():
        if system.reference is None:
            continue
        assert names.index(system.reference) < names.index(name)
        if system.lossless:
            reference = SYSTEMS[system.reference].options
            assert reference[:2] == system.options[:2]
            assert ("8bit" in reference) == ("8bit" in system.options)
            assert "--sync" not in system.options


def test_what_is_lossless_must_be_equal_to_rounding():
    assert whole_systems.failures(SYSTEMS, made_up()) == []
    losses = [4.0 - 0.01 * i for i in range(40)]
    wrong = [loss * (1 + 1e-3 * (i == 5)) for i, loss in enumerate(losses)]
    late = [loss * (1 + 1e-3 * (i > 30)) for i, loss in enumerate(losses)]  # rounding has grown
    nan = [loss if i != 5 else float("nan") for i, loss in enumerate(losses)]
    (found,) = whole_systems.failures(SYSTEMS, made_up({"ZeRO 3 + AdamW": wrong}.items()))
    assert found.startswith("ZeRO 3 + AdamW is lossless, but its losses differ")
    assert whole_systems.failures(SYSTEMS, made_up({"ZeRO 3 + AdamW": late}.items())) == []
    assert whole_systems.failures(SYSTEMS, made_up({"ZeRO 3 + AdamW": nan}.items()))
    lossy = {"ZeRO 2 + AdamW, PowerSGD of rank 4": wrong}
    assert whole_systems.failures(SYSTEMS, made_up(lossy.items())) == []


def test_rows_have_every_column():
    lines = list(whole_systems.rows(SYSTEMS, made_up()))
    columns = whole_systems.HEADER.splitlines()[0].count("|")
    assert len(lines) == len(SYSTEMS)
    assert {line.count("|") for line in lines} == {columns}
    assert "| 3 | 4 | - |" in lines[0]
    some = {name: one for name, one in made_up().items() if name in whole_systems.FEW}
    assert len(list(whole_systems.rows(SYSTEMS, some))) == 2


def test_a_system_without_its_reference_is_compared_with_nothing():
    name = "ZeRO 2 + CAME 8-bit"
    some = {name: made_up()[name]}
    (line,) = whole_systems.rows(SYSTEMS, some)
    assert "| - | 3.6100 | - | - | - |" in line
    assert whole_systems.failures(SYSTEMS, some) == []
