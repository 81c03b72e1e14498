"""`scripts/report.py history`: a metric over time, with the commits and packages at which it changed.

The modules, in the order of a first reading: `command` makes a `series` of each cell, `change_points` divides it where
its level changes, and `render` prints the result.
"""
