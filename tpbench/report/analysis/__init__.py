"""What rows say. The modules, in the order of a first reading:

- `metrics` says which column is a time, a rate or a size, and how its values are written.
- `records` are rows as dictionaries, with the texts of their values and the marks beside them.
- `grid` arranges records: problems by variants. It decides what splits a problem.
- `comparison` is the ratio of two groups of records with its interval, and `conditions` says which may be compared.
- `power` says which changes a comparison can see, and the factor that all cells have in common.
- `changes` pairs the cells of two sets of rows, with a verdict on each pair.
- `verdicts` names the fastest variant of each problem and doubts about it, and warns of rows that disagree.
"""
