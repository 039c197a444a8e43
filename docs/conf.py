"""Settings of the documentation site: `make docs` builds build/docs/index.html.

Nothing is downloaded while building or reading: no inventories, fonts or scripts of other hosts.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER / "extensions")]

import legacy_ddp  # noqa: E402 - found through the path above

project = "legacy_ddp"
author = "legacy_ddp contributors"
project_copyright = author
version = release = legacy_ddp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "repository_links",
    "dark_images",
    "page_links",
    "public_names",
    "search_texts",
]
exclude_patterns = ["extensions"]

# Pages: Markdown, with the anchors of headings that GitHub makes.
myst_heading_anchors = 4
highlight_language = "text"
repository_pages = {
    "README.md": "overview",
    "CHANGELOG.md": "project/changelog",
    "CONTRIBUTING.md": "project/contributing",
    "SECURITY.md": "project/security",
    "benchmarks/README.md": "project/benchmarks",
}

# Reference: the order and the words of the source. Types stand in the signature, a parameter a line.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
autodoc_default_options = {"members": True}
autoclass_content = "class"
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
napoleon_numpy_docstring = False
# Types without a public name.
nitpick_ignore = [
    ("py:class", "legacy_ddp._check_settings.LossScaler"),
    ("py:class", "legacy_ddp._explain.attribution.Verdict"),
    ("py:class", "legacy_ddp._wrapper.ModuleT_co"),
]
# Names of other packages; their documentation is elsewhere, and an inventory would have to be downloaded.
nitpick_ignore_regex = [("py:.*", r"(torch|nn|dist|lightning|collections|contextlib|os|pathlib|types|typing)\..*")]

html_theme = "pydata_sphinx_theme"
html_title = f"legacy_ddp {version}"
html_theme_options = {
    "navbar_align": "left",
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
# The navigation of a section would be empty there.
html_sidebars = {"index": [], "overview": [], "source/**": []}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["narrow.js"]
html_show_search_summary = False  # search_texts has summaries that need no server
html_use_index = False
html_domain_indices = False
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"
