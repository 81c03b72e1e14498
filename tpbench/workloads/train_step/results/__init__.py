"""What a run reports: its speed, the times of its phases, a profile and progress, and what is made of its rows.

The modules, in the order of a first reading: `throughput`, `phase_times`, `profiling`, `progress`; from rows
`json_document` and `agreement_study`.
"""
