# Configuration of Sphinx. The sources are assembled by assemble.py; scripts/site.sh runs both.
import os

project = "Reprise"
author = "the Reprise authors"
copyright = "the Reprise authors, Apache-2.0"  # noqa: A001, a name of Sphinx
release = version = os.environ.get("REPRISE_VERSION", "")

extensions = ["myst_parser"]

myst_enable_extensions = ["deflist", "attrs_image", "colon_fence"]
myst_heading_anchors = 4
highlight_language = "bash"

html_show_sourcelink = False
html_theme = "furo"
html_title = "Reprise"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1a5fb4",
        "color-brand-content": "#1a5fb4",
    },
    "dark_css_variables": {
        "color-brand-primary": "#8ab8f5",
        "color-brand-content": "#8ab8f5",
    },
}
