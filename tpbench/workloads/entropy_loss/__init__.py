"""The entropy loss over a vocabulary sharded across tensor-parallel ranks, forward and backward.

Each rank holds a contiguous slice of every token's logits. Over the whole vocabulary, p = softmax(logits_scale *
logits). For the losses against target logits, q = softmax(logits_scale / temperature * target). A row's loss is one of

- cross_entropy: -log p[label]
- policy: the clipped loss of PPO and GRPO from log p[label], with p = softmax(logits_scale / temperature * logits)
- soft_cross_entropy: -sum(q log p)
- forward_kl: KL(q || p) = sum(q (log q - log p))
- reverse_kl: KL(p || q) = sum(p (log p - log q))
- jsd: (KL(q || m) + KL(p || m)) / 2 with m = (p + q) / 2
- total_variation: sum(|p - q|) / 2.

An iteration computes each row's loss, the mean over the rows that count, and the mean's gradient by the local logits. A
temperature softens the targets only (Fast-LLM's convention). To soften both distributions, set `logits_scale`.
"""

from tpbench.workloads.entropy_loss.problem import WORKLOAD as WORKLOAD
from tpbench.workloads.entropy_loss.problem import EntropyLoss as EntropyLoss
