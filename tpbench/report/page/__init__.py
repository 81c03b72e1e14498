"""The HTML report: one file that contains everything and loads nothing from the network.

The modules, in the order of a first reading:

- `html_page` is the whole page. Its first screen is the `overview`, with the `machines`.
- `tables` of a section become `cells`, plain data. `pictures` are made from grids, with `chart` and `trace`.
- `column_styles` gives each variant its colour and marker. `template` renders all of it, and escapes text.
"""
