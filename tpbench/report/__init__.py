"""Tables, plots and pages made from rows. Nothing here imports torch.

The modules, in the order of a first reading:

- Command: `command` is `scripts/report.py`. `compare` and `history` are commands of their own.
- `command_line`: `parser`, `selection` and `rows` read the options of a command and the rows that they select,
  `output_format` writes to a file.
- `grids`: `comparable` spells equal options equally. `records` are rows as dictionaries. `arrange` puts them in a
  `grid`: problems by variants. `size_panels` arranges a grid by size.
- `numbers`: `metric` says which column is a time, a rate or a size. `ratio` and `interleaved` compare two cells with an
  interval, `samples` finds outliers. `clocks` are that of the device and that of the wall.
- `conclusions`: `verdicts` names the fastest variant of a problem and doubts about it, `answers` makes sentences of
  them. `agreement` warns of equal problems with different losses, `mixing` of rows of several hosts or versions.
- `tables`: `pivot` makes a `pivot_report` of one metric, and `render` writes it. `cell_table` has several columns:
  those of `columns`, which a user chose, or of a `study` of a workload, which `points` draws. `writer` has text,
  Markdown and CSV for all of them, `escape` makes text from rows safe.
- Pictures and pages: `plots` draws with matplotlib, and `page` is the HTML report.
- Others: `repeat` measures a row again with the command from `repeat_command`. `json_documents` writes JSON.
"""
