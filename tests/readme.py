"""Runs the Python examples of Markdown files: those of one file in order, in a fresh interpreter.

python tests/readme.py README.md docs/how_to/linen.md
"""

import pathlib
import re
import subprocess
import sys


def blocks(path, language="python"):
    """The code blocks of a Markdown file in one language."""
    text = pathlib.Path(path).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    for file in sys.argv[1:]:
        examples = blocks(file)
        assert examples, f"{file} has no example"
        subprocess.run([sys.executable, "-c", "\n".join(examples)], check=True)
        print(f"{len(examples)} examples of {file} ran")
