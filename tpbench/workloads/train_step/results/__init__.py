"""Results of a run: its speed, the times of its phases, a profile and progress, and documents made from rows.

The modules, in the order of a first reading: `throughput`, `phase_times`, `profiling`, `progress`; from rows
`json_document` and `agreement_study`.
"""
