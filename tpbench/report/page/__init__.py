"""The HTML report: one file that contains everything and loads nothing from the network.

`html_page` makes it, with pictures from `tpbench.report.plots`. Jinja renders it by the templates of this folder, and
escapes all text that a template does not mark as safe.
"""
