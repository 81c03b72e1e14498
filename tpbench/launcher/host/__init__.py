"""Cells on this host, each with its own torchrun or in one that stays."""
