"""The table of whole systems: what is lossless is held to its reference."""

import numpy as np
import whole_systems
from whole_systems import SYSTEMS, Outcome

LOSSES = 4.0 - 0.01 * np.arange(40)


def made_up(name=None, losses=LOSSES):
    """All systems with the same losses, but for one."""
    return {each: Outcome({}, losses if each == name else LOSSES) for each in SYSTEMS}


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
