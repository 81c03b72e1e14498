"""What rows say. The modules, in the order of a first reading:

- `metrics` says which column is a time, a rate or a size, and makes ratios of two with an interval.
- `records` are rows as dictionaries, with the texts of their values and the marks beside them.
- `grid` arranges records: problems by variants. It decides what splits a problem.
- `uncertainty` gives a ratio of two records its interval.
- `verdicts` names the fastest variant of each problem and doubts about it, and warns of rows that disagree.
"""
