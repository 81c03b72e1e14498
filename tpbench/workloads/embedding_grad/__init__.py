"""Mean gradient of a large embedding table over data-parallel ranks, left sharded over the ranks that own its rows.

Each of W ranks holds the whole (table_rows, width) gradient, of which its tokens touched a few rows. Each rank owns
ceil(table_rows / W) consecutive rows. After an iteration each owner has the mean over ranks of its rows. A dense
collective sends the whole table. A sparse exchange sends only the touched rows that other ranks own:

1. Find the distinct touched rows, split them by owner, and exchange their counts (CPU, before the forward pass).
2. Exchange the row numbers (after the forward pass, beside the backward pass).
3. Gather the rows from the table and exchange them (after the backward pass).
4. Merge them into the owner's slice, times 1/W.

The exchange comes from a modded-nanogpt speed record: https://github.com/KellerJordan/modded-nanogpt
"""

from tpbench.workloads.embedding_grad.problem import WORKLOAD as WORKLOAD
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad as EmbeddingGrad
