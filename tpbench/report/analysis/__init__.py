"""What rows say. The modules, in the order of a first reading:

- `records` are rows as dictionaries, with the texts of their values and the marks beside them.
- `grid` arranges records: problems by variants. It decides what splits a problem.
- `metrics` says which column is a time, a rate or a size, and ranks records by it.
- `ratios` compares two records with an interval, and finds outliers.
- `agreement` warns of equal problems with different losses, and of rows of several hosts or versions.
- `verdicts` names the fastest variant of each problem, doubts about it, and makes sentences of both.
"""
