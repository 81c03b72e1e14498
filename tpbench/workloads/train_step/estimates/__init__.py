"""Estimates before anything runs: memory, communicated bytes and FLOPs of a rank.

The modules, in the order of a first reading: `rank_sizes` counts parameters and FLOPs, `memory` estimates bytes that a
rank holds, and `communicated_bytes` counts those that it sends, with `plan_bytes`.
"""
