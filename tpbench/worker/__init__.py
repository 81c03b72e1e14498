"""The life of a rank: process group, workload, measurement, result."""
