"""One cell of a sweep: the attempts at it, how they ended, and its row."""
