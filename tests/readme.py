"""Runs the Python examples of README.md, each in a fresh interpreter.

python tests/readme.py README.md --without flax    # those that do not name Flax
python tests/readme.py README.md --with flax       # those that do
"""

import pathlib
import re
import subprocess
import sys


def blocks(path, language="python"):
    """The code blocks of a Markdown file in one language."""
    text = pathlib.Path(path).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run(code):
    """Runs one example; raises with its output if it fails."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{code}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    file, choice, word = sys.argv[1:]
    chosen = [code for code in blocks(file) if (word in code) == (choice == "--with")]
    assert chosen, f"no example {choice[2:]} {word!r} in {file}"
    for code in chosen:
        run(code)
    print(f"{len(chosen)} examples of {file} {choice[2:]} {word!r} ran")
