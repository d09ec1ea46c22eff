"""The ``command-help`` directive shows what ``optax-ext ... --help`` prints."""

import os
import subprocess
import sys

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


class CommandHelp(SphinxDirective):
    """``.. command-help:: plan`` for ``optax-ext plan --help``."""

    optional_arguments = 1

    def run(self):
        """A block with the printed text."""
        command = [sys.executable, "-m", "sharding.plan._cli", *self.arguments, "--help"]
        text = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"COLUMNS": "84", "NO_COLOR": "1"},
        ).stdout
        return [nodes.literal_block(text, text, language="text")]


def setup(app):
    """Registers the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
