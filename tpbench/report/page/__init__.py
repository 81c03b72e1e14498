"""The HTML report: one file that contains everything and loads nothing from the network.

`html_page` is the whole page, with pictures from `tpbench.report.plots`; `page_tables` makes the tables of a section.
Jinja renders both by the templates of this folder. It escapes all text that a template does not mark as safe.
"""
