"""Pictures of the report, drawn by matplotlib.

`style` is the look of all plots. `panels` draws lines over panels, for studies of workloads and for `grid_plots`, which
has the plots of a grid of records.
"""
