"""Variants and workloads in a user's file. The launcher reads its text (`source`) and never runs it.

A process of its own (`describe`) and the ranks run the file (`loading`). `variant` is what the launcher then knows.
"""
