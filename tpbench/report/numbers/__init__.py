"""The numbers of a report: metrics of a row, ratios of two cells with an interval, and outliers."""
