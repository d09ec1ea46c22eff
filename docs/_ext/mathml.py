"""Renders formulas as MathML while the site is built: readers need no script and no network."""

import re

from docutils import nodes
from docutils.utils.math import latex2mathml


def _render(text, display=False):
    # Sizes of delimiters are the browser's choice in MathML.
    text = re.sub(r"\\[Bb]ig+[lr]?(?![a-z])", "", text)
    return latex2mathml.tex2mathml(text, as_block=display)


def visit_inline(self, node):
    """A formula in a sentence."""
    self.body.append(_render(node.astext()))
    raise nodes.SkipNode


def visit_block(self, node):
    """A formula on its own."""
    text = node.astext()
    if "&" in text and r"\begin" not in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    self.body.append(f'<div class="math">{_render(text, display=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    """Registers the renderer, for ``html_math_renderer``."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(visit_inline, None), block_renderers=(visit_block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
