"""The ``command-help`` directive shows what ``optax-ext ... --help`` prints."""

import contextlib
import io
import os
import sys
import unittest.mock

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from sharding.cli import main


class CommandHelp(SphinxDirective):
    """``.. command-help:: plan`` for ``optax-ext plan --help``."""

    optional_arguments = 1

    def run(self):
        """A block with the printed text."""
        self.env.note_reread()  # in each build: the text depends on code, not on the page
        printed = io.StringIO()
        with (
            unittest.mock.patch.dict(os.environ, COLUMNS="84"),
            unittest.mock.patch.object(sys, "argv", ["optax-ext"]),
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
        ):
            main([*self.arguments, "--help"])
        text = printed.getvalue()
        if "usage: optax-ext" not in text:
            raise self.error(f"optax-ext {self.arguments} --help printed no help, but: {text!r}")
        return [nodes.literal_block(text, text, language="text")]


def setup(app):
    """Registers the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
