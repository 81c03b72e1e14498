"""The HTML report: one file that contains everything and loads nothing from the network."""
