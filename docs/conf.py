"""Settings of the documentation site, which `make docs` builds into `build/docs` without a network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

import streamloader

project = "streamloader"
author = "The streamloader authors"
copyright = "the streamloader authors"  # noqa: A001 - Sphinx's name
version = release = streamloader.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "llms", "anchors"]

# The source folder is the repository, so that links between pages work in the site as they do in the repository.
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "formats/**.md",
    "bench/*.md",
    "bench/results/*.md",
    *("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "changes/README.md"),
]
exclude_patterns = [
    ".*",
    "formats/*/input",
    "build",
    "dist",
    "**/node_modules",
    "**/__pycache__",
    "streamloader",
    "tests",
]

smartquotes = False  # texts in quotes are often values
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # the anchors of GitHub

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"streamloader {release}"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_extra_path = ["_site/root"]
html_copy_source = True
html_sourcelink_suffix = ""  # the sources are the Markdown that llms.txt lists
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
