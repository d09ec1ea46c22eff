"""Forty plans whose figures stay to the last digit: models, machines, stages, schedules, offload.

``python tests/sharding/plan/test_forty_plans.py`` records them again, where a change is meant.
"""

import contextlib
import io
import json
import pathlib

import jax
import pytest

from sharding.cli import main
from sharding.plan import audit

RECORDED = pathlib.Path(__file__).with_name("forty_plans.json")
# Searches of seconds whose choices other lines keep, too.
SLOW = "--keep stage=0", "--keep stage=1 --master", "--sync qsgd(8) --keep sync=qsgd(8)"


def figures_of(line):
    """Bytes and seconds of a command's plans, or of a recorded program."""
    if line.endswith(".txt"):
        found = audit(RECORDED.with_name("programs").joinpath(line).read_text()).to_dict()
        names = ("memory", "wire_bytes", "matmul_flops", "arguments", "at_peak", "nbytes")
        return {name: found[name] for name in names}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([*line.split(), "--json"])
    found = json.loads(out.getvalue())
    first = found["plans"][0]
    if first["seconds"]:
        rows = found["plans"]
        plans = [[x["plan"], x["seconds"]["total"], x["memory"]["total"]] for x in rows]
    if line.startswith("search"):
        return {"bound": found["bound"], "compared": found["compared"], "plans": plans}
    if "bubble" in first:
        return {"bubble": first["bubble"], "plans": plans, "stage": first["stages"][0]}
    names = ("name", "memory", "peak", "unreduced", "wire", "network", "host_wire", "moved")
    return {"stages": [[x["zero"][name] for name in names] for x in found["plans"]]}


# What the layers store depends on the version of jax.
@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="recorded with jax 0.10")
@pytest.mark.parametrize(
    ("line", "figures"),
    [
        pytest.param(*both, marks=pytest.mark.slow if both[0].endswith(SLOW) else ())
        for both in json.loads(RECORDED.read_text()).items()
    ],
)
def test_figures_stay(line, figures):
    assert figures_of(line) == figures


if __name__ == "__main__":
    pairs = [(line, figures_of(line)) for line in json.loads(RECORDED.read_text())]
    rows = [f"{json.dumps(line)}: {json.dumps(figures)}" for line, figures in pairs]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
