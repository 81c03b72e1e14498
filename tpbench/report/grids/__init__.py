"""Rows as records, arranged in grids: problems by variants."""
