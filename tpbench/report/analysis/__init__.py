"""What rows say: first `metrics` and `records`, then `grid`, then `comparison`, which all others use."""
