"""Tables, plots and pages made from rows. Nothing here imports torch.

The modules, in the order of a first reading:

- Command: `command` is `scripts/report.py`. `parser`, `selection` and `rows` read its options and the rows that they
  select, `output_format` writes to a file. `compare`, `history` and `gallery` are commands of their own.
- Rows: `comparable` spells equal options equally. `records` are rows as dictionaries. `arrange` puts them in `grids`:
  problems by variants.
- Numbers: `metric` says which column is a time, a rate or a size. `ratio` and `interleaved` compare two cells with an
  interval, `samples` finds outliers. `clocks` are that of the device and that of the wall.
- A table of one metric: `pivot` makes a `pivot_report`, and `render` writes it.
- A table of several columns: `cell_table` makes it for `columns`, which a user chose, and for a `study` of a workload.
  `points` draws a study.
- Text: `writer` has text, Markdown and CSV for all of them, `escape` makes text from rows safe.
- Answers: `verdicts` names the fastest variant of a problem and doubts about it, `answers` makes sentences of them.
  `agreement` warns of equal problems with different losses, `mixing` of rows of several hosts or versions.
- Pictures and pages: `plots` draws with matplotlib, `size_panels` arranges by size, and `page` is the HTML report.
- Others: `repeat` measures a row again with the command from `repeat_command`. `json_documents` writes JSON.
"""
