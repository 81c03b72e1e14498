"""The HTML report: one file with everything in it, which asks no network for anything."""
