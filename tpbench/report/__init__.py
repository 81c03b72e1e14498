"""Tables, plots and pages made from rows. Nothing here imports torch.

`command`, `compare` and `history` are the commands. `analysis` says what rows show. `pivot` and `studies` make
tables, `plots` pictures with matplotlib, and `page` the HTML report.
"""
