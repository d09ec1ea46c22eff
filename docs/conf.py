"""The documentation site: ``make docs`` builds it into ``docs/_build/html``."""

import os
import pathlib
import sys

DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))
# The modules are imported for their docstrings; no accelerator is needed for that.
os.environ["JAX_PLATFORMS"] = "cpu"

from copied import copy_pages  # noqa: E402

import optax_ext  # noqa: E402

# Pages that live elsewhere in the repository. Git ignores the copies.
PAGES = (
    "CHANGELOG.md",
    "benchmarks/**/*.md",
    "benchmarks/results/**/*.png",
    "notebooks/*.ipynb",
)
copy_pages(DOCS.parent, DOCS, PAGES)

project = "optax-ext"
author = "The optax-ext authors"
copyright = author
version = release = optax_ext.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "myst_nb",
    "command_help",
    "devices",
    "images",
    "mathml",
    "signatures",
]
exclude_patterns = ["_build"]

# API reference.
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False  # signatures have them

# Markdown and notebooks. The outputs of notebooks are stored in them; the tests execute them.
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True

# Appearance. Nothing is loaded from other hosts.
html_theme = "sphinx_book_theme"
html_title = f"optax-ext {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "_ext" / "search.js")
html_math_renderer = "mathml"
html_theme_options = {
    "show_toc_level": 1,
    "navbar_persistent": [],
    "navigation_with_keys": False,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": False,
}
# The "edit" button of each page, where the environment names the repository.
if REPOSITORY := os.environ.get("DOCS_REPOSITORY"):
    html_theme_options |= {
        "repository_url": REPOSITORY,
        "repository_branch": "main",
        "path_to_docs": "docs",
        "use_edit_page_button": True,
    }
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = ">>> "


def edit_the_original(app, page, template, context, doctree):
    """Copied pages are edited where they were copied from."""
    if any(page.split("/")[0] == pattern.split("/")[0].split(".")[0] for pattern in PAGES):
        context["doc_path"] = ""


def setup(app):
    """Connects it."""
    app.connect("html-page-context", edit_the_original)
