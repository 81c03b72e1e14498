"""The HTML report: one file that contains everything and loads nothing from the network.

The modules, in the order of a first reading:

- `html_page` is the whole page, with pictures from `tpbench.report.plots`.
- `page_tables` makes the tables of a section. `template` renders all of it, and escapes text.
"""
