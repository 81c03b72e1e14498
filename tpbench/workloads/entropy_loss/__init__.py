"""The entropy loss over a vocabulary sharded across tensor-parallel ranks, forward and backward.

Each rank holds a contiguous slice of every token's logits. Over the whole vocabulary, p = softmax(logits_scale *
logits). For the losses against target logits, q = softmax(logits_scale / temperature * target). A row's loss is one of

- cross_entropy: -log p[label]
- soft_cross_entropy: -sum(q log p)
- forward_kl: KL(q || p) = sum(q (log q - log p))
- reverse_kl: KL(p || q) = sum(p (log p - log q)).

An iteration computes each row's loss, the mean over the rows that count, and the mean's gradient with respect to the
local logits, in the logits' dtype. A temperature softens the targets only, as in distillation from a teacher
(Fast-LLM's convention). To soften both distributions, set `logits_scale`.

The modules, in the order of a first reading:

- Job: `problem` has the fields and the columns. `variants` and `peers` have a function for each variant, of this
  project and of others.
- Rank: `bench` is the session. `inputs` makes a rank's shard, and `output` is what an iteration returns.
- Implementations: `triton_tp`, `manual` and `gather` are those of this project. `adapters` call other projects, with
  `differentiated` for those that leave the gradient to autograd.
- Correctness: `oracle` computes in float64 and compares. `limits` are its tolerances.
- From rows: `cost_model` is for forecasts, and `winners` chooses block caps.
"""

from tpbench.workloads.entropy_loss import (
    variants as variants,
)  # first: tables list variants in the order of registration

# isort: split
from tpbench.workloads.entropy_loss import peers as peers
from tpbench.workloads.entropy_loss.problem import WORKLOAD as WORKLOAD
from tpbench.workloads.entropy_loss.problem import EntropyLoss as EntropyLoss
