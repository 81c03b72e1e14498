"""GPU communication for several workloads: symmetric buffers, signals, peer copies, collectives, CUDA driver calls."""
