"""Messages between the launcher and the ranks of a cell: a task in, a result out, each a JSON file in the cell's
folder.

This package is all that both sides share. It imports neither torch nor Arrow, so that a rank starts fast and can report
that its memory ran out.
"""
