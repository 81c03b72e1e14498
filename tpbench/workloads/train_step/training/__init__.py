"""The training loop, which all variants share, and a trainer for each variant."""
