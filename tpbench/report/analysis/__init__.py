"""What rows say. The modules, in the order of a first reading:

- `metrics` says which column is a time, a rate or a size, and how its values are written.
- `records` are rows as dictionaries, with the texts of their values and the marks beside them.
- `grid` arranges records: problems by variants. It decides what splits a problem.
- `comparison` is the ratio of two groups of records with its interval.
- `pairs` puts the cells of two sets of rows in pairs, and says which may be compared.
- `changes` gives each pair a verdict, and says which changes such rows can show.
- `verdicts` names the fastest variant of each problem and doubts about it, and warns of rows that disagree.
"""
