"""Two sets of rows against each other: what got faster, what slower, and what cannot be compared."""
