"""Token rows of a rank, and the partition of the table's rows over their owners.

The modules, in the order of a first reading: `row_partition`, then `distributions` of tokens, one of which hashes the
`bigrams` of `sample_text`.
"""
