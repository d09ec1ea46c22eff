"""Plants the faults of mutations.txt, one at a time, and runs the tests that should see them.

  python tests/mutations.py [--match TEXT] [--jobs N] [--marks EXPRESSION]

A fault is a block of mutations.txt: the file and the tests that should see it, what it breaks and
(in parentheses) the commit that mended it where it was made once, then the lines that it replaces
(-) and puts in their place (+). The text after a - occurs once in the file. Each fault is planted
in a copy of the tree; the exit code is 1 if one is missed.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
MARKS = "not slow and not script"  # as pyproject.toml has it: what `make test` runs


@dataclasses.dataclass(frozen=True)
class Fault:
    file: str  # that it is in
    tests: tuple[str, ...]  # what pytest runs to see it
    breaks: str  # the promise that it breaks
    old: str  # the text that it replaces, which occurs once in the file
    new: str  # what stands there instead

    @classmethod
    def parse(cls, block):
        head, breaks, *lines = block.splitlines()
        file, *tests = head.split()
        old, new = ([x[1:] for x in lines if x.startswith(sign)] for sign in "-+")
        end = "" if new else "\n"  # lines that are left out
        return cls(file, tuple(tests), breaks, "\n".join(old) + end, "\n".join(new))

    def plant(self, source):
        if source.count(self.old) != 1:
            count = source.count(self.old)
            raise ValueError(f"{self.file} has {self.old!r} {count} times, not once.")
        return source.replace(self.old, self.new)


def faults():
    """All of mutations.txt; lines that begin with # are comments."""
    text = (ROOT / "tests" / "mutations.txt").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.M)
    return [Fault.parse(block) for block in text.strip().split("\n\n")]


def copy_of_the_tree(folder):
    """The tracked and the new files, without what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in done.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def caught(fault, tree, marks):
    """The test that fails with the fault; None if all pass."""
    path = tree / fault.file
    source = path.read_text()
    path.write_text(fault.plant(source))
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    env["JAX_COMPILATION_CACHE_DIR"] = cache
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks]
    try:
        done = subprocess.run(
            [*command, *fault.tests], cwd=tree, env=env, capture_output=True, text=True, timeout=900
        )
    except subprocess.TimeoutExpired:
        return "no end after 15 minutes"
    finally:
        path.write_text(source)
    if done.returncode < 0:
        return f"signal {-done.returncode} ended the tests"
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run {fault.tests}:\n{done.stdout}{done.stderr}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.M)
    return found.group(1) if found else None


def main(arguments=None):
    """Prints a line for each fault; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--match", default="", help="only faults whose block has this text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--marks", default=MARKS, help='pytest -m; "" for all tests')
    options = parser.parse_args(arguments)
    chosen = [f for f in faults() if options.match in f"{f.file} {f.tests} {f.breaks} {f.old}"]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        trees = queue.SimpleQueue()
        for i in range(options.jobs):
            trees.put(copy_of_the_tree(pathlib.Path(folder) / str(i)))

        def run(fault):
            tree = trees.get()
            try:
                return fault, caught(fault, tree, options.marks)
            finally:
                trees.put(tree)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for done in concurrent.futures.as_completed([pool.submit(run, f) for f in chosen]):
                fault, test = done.result()
                found[fault] = test
                print("caught" if test else "MISSED", f"{fault.file}: {fault.breaks}", flush=True)
    missed = [fault for fault in chosen if not found[fault]]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
