"""The messages between the launcher and the ranks: files in the folder of a cell."""
