"""GPU communication shared by workloads: collectives, symmetric buffers, signals, CUDA driver calls."""
