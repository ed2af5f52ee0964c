"""Sphinx configuration of the documentation, which scripts/docs builds."""

from datetime import UTC, datetime

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.highlighting import lexers

project = "Forebay"
author = "The Forebay authors"
copyright = f"{datetime.now(UTC):%Y}, {author}"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["examples"]

html_theme = "furo"
html_title = "Forebay"
html_static_path: list[str] = []
html_copy_source = False

# Links to a heading use the anchors that GitHub makes, so that they work in both.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

# Docstrings are plain text with code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
# The build has no network, so there is no inventory in which types of other projects could be looked up.
nitpick_ignore_regex = [("py:.*", ".*")]


def setup(_app: Sphinx) -> None:
    """Show Mermaid diagrams as text: drawing them in the browser would need a script from elsewhere."""
    lexers["mermaid"] = TextLexer()
