"""What the entropy loss and the linear loss share: a loss over a vocabulary that is sharded over ranks.

An entropy loss is a linear loss whose logits are given. So both have the same losses from labels and from target
logits, random labels and matrices, row-wise float64 oracle, and losses in torch operations.
"""
