"""Tables, plots and pages made from rows. Nothing here imports torch.

The modules, in the order of a first reading:

- Commands: `command` is `tpbench report`; `compare`, `history` and `rows` are commands of their own. `command_line` has
  the options that they share.
- `analysis`: what rows say: records, grids of problems by variants, metrics, ratios, warnings and verdicts.
- Tables: `pivot` makes tables of one metric, `studies` those with a line for each cell. All are `tpbench.tables`.
- Pictures and pages: `plots` draws with matplotlib, and `page` is the HTML report.
"""
