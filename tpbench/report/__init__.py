"""Tables, plots and pages made from rows. Nothing here imports torch."""
