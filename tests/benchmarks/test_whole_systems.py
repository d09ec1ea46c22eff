"""The table of whole systems: what is lossless is held to its reference."""

import numpy as np
import whole_systems
from whole_systems import SYSTEMS, Outcome

LOSSES = 4.0 - 0.01 * np.arange(40)


def made_up(name=None, losses=LOSSES):
    """All systems with the same losses, but for one."""
    sizes = {"bytes_per_device": {"params": 1024, "opt_state": 2048}, "wire_bytes": 4096.0}

    def outcome(losses):
        return Outcome({"val_loss": losses[-1], **sizes}, np.array(losses))

    return {each: outcome(losses if each == name else LOSSES) for each in SYSTEMS}


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
    step, lossless, lossy = np.arange(40), "ZeRO 3 + AdamW", "ZeRO 2 + AdamW, PowerSGD of rank 4"
    wrong = LOSSES * (1 + 1e-3 * (step == 5))
    late = LOSSES * (1 + 1e-3 * (step > 30))  # rounding has grown
    nan = np.where(step == 5, np.nan, LOSSES)
    assert whole_systems.failures(SYSTEMS, made_up()) == []
    (found,) = whole_systems.failures(SYSTEMS, made_up(lossless, wrong))
    assert found.startswith("ZeRO 3 + AdamW is lossless, but its losses differ")
    assert whole_systems.failures(SYSTEMS, made_up(lossless, late)) == []
    assert whole_systems.failures(SYSTEMS, made_up(lossless, nan))
    assert whole_systems.failures(SYSTEMS, made_up(lossy, wrong)) == []


def test_rows_have_every_column():
    lines = list(whole_systems.rows(SYSTEMS, made_up()))
    columns = whole_systems.HEADER.splitlines()[0].count("|")
    assert len(lines) == len(SYSTEMS)
    assert {line.count("|") for line in lines} == {columns}
    assert "| 3 | 4 | - |" in lines[0]
    # A system without its reference is compared with nothing.
    some = {name: made_up()[name] for name in ("ZeRO 2 + CAME 8-bit",)}
    (line,) = whole_systems.rows(SYSTEMS, some)
    assert "| - | 3.6100 | - | - | - |" in line
    assert whole_systems.failures(SYSTEMS, some) == []
