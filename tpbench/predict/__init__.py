"""Predict the time and memory of problems that were not measured, from rows. Imports no torch."""
