"""The entropy loss over a vocabulary sharded across tensor-parallel ranks, forward and backward.

Each rank holds a contiguous slice of every token's logits. With p = softmax(logits_scale * logits) over the whole
vocabulary and, for the losses against target logits, q = softmax(logits_scale / temperature * target):

- cross_entropy: -log p[label]
- soft_cross_entropy: -sum(q log p)
- forward_kl: KL(q || p) = sum(q (log q - log p))
- reverse_kl: KL(p || q) = sum(p (log p - log q))

An iteration makes each row's loss, their mean over the rows that count, and that mean's gradient with respect to the
local logits in the logits' dtype. A temperature softens the targets alone, as in distillation from a teacher whose
logits are softened (Fast-LLM's convention); softening both is `logits_scale`.
"""

from tpbench.workloads.entropy_loss import variants as variants  # before others': tables have their order

# isort: split
from tpbench.workloads.entropy_loss import peers as peers
from tpbench.workloads.entropy_loss.problem import WORKLOAD as WORKLOAD
from tpbench.workloads.entropy_loss.problem import EntropyLoss as EntropyLoss
