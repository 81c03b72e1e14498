"""The parts that all report commands share: their options, the rows that these select, and the file of the output."""
