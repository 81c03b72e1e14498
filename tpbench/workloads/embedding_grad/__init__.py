"""The gradient of a large embedding table, averaged over data-parallel ranks and left sharded over their rows' owners.

Each of W ranks holds the whole (table_rows, width) gradient of which its tokens touched a few rows, and owns
ceil(table_rows / W) consecutive rows. An iteration leaves each owner with the mean over ranks of its rows. The dense
collectives send the whole table; a sparse exchange sends the touched rows that belong to others, and their numbers:

1. the sorted distinct rows, cut at the owners' bounds; how many go to whom (CPU, before the forward pass),
2. their numbers (after the forward pass, beside the backward),
3. the rows themselves, gathered from the table (after the backward pass),
4. merged into the owner's slice, times 1/W.

The exchange is that of a modded-nanogpt speed record: https://github.com/KellerJordan/modded-nanogpt
"""

from tpbench.workloads.embedding_grad import variants as variants
from tpbench.workloads.embedding_grad.problem import WORKLOAD as WORKLOAD
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad as EmbeddingGrad
