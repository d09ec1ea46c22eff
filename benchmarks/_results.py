"""Writes a benchmark's tables to results/, with their command, commit, date and versions."""

import datetime
import importlib.metadata
import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def _versions() -> str:
    """The versions of jax, and of the TPU compiler where it was imported."""
    names = ["jax", *(["libtpu"] if "libtpu" in sys.modules else [])]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def table(header: str, rows: Iterable[str]) -> str:
    """Lines under their header; each is printed as soon as it is measured."""
    lines = []
    for line in itertools.chain([header], rows):
        print(line, flush=True)
        lines.append(line)
    return "\n".join(lines)


def commit() -> str:
    """The commit of the code, marked "+" if files other than results have changed since.

    On a machine that has the files alone, the environment variable COMMIT says it.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]

    def git(*args: str) -> str:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    results = f":(exclude){RESULTS.relative_to(ROOT)}"
    changed = git("diff", "--name-only", "HEAD", "--", ".", results)
    return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")


def machine(accelerator: str) -> str:
    """The accelerator, or "cpu" with its model where that is known, and the number of cores."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    model = f"cpu ({models[0]})" if accelerator == "cpu" and models else accelerator
    return f"{model}, {os.cpu_count()} cores"


def write(name: str, title: str, about: str, *parts: str, script: str | None = None) -> None:
    """Writes results/<name>.md: title, command and description, and the parts.

    The command is benchmarks/<name>.py, or ``script`` there.
    """
    text = "\n\n".join([f"# {title}", _how(f"{script or name}.py", about), *parts])
    (RESULTS / f"{name}.md").write_text(f"{text}\n")


def write_section(name: str, title: str, about: str, part: str, script: str) -> None:
    """Writes the last section of results/<name>.md, with the command that makes it alone."""
    path = RESULTS / f"{name}.md"
    before = path.read_text().split(f"\n## {title}\n")[0].strip()
    path.write_text("\n\n".join([before, f"## {title}", _how(script, about), part]) + "\n")


def _how(command: str, about: str) -> str:
    """The command, commit, date and versions of a table, and its description."""
    made = f"at commit {commit()}, {datetime.date.today()}, {_versions()}"
    return f"`python benchmarks/{command}` {made}. {about}".strip()
