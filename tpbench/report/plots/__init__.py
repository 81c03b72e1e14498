"""Pictures of the report, drawn by matplotlib.

`figures` draws lines over panels, for studies of workloads and for `grid_plots`, which has the plots of a grid of
records.
"""
