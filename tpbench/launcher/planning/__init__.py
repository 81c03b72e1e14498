"""The plan of a sweep: which cells there are, which can run, and how long they take."""
