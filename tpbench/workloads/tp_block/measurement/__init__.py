"""Costs of a step, what the machine reaches, and how much communication is hidden.

The modules, in the order of a first reading: `costs` counts, `machine_rates` and `exposed_communication` measure,
`trace` draws a step's timeline, and `overlap_study` says where overlap pays.
"""
