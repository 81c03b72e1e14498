"""A language model's head and its entropy loss, forward and backward, with the vocabulary sharded over the ranks.

Each rank holds all hidden states, (tokens, hidden), and its rows of the head's weight, (local vocab, hidden). logits =
hidden states @ weight.T. The losses are those of `entropy_loss`; target logits are those of a teacher of this size. An
iteration computes the mean loss and, with mode=train, its gradients by hidden states (summed over the ranks) and
weight. With mode=forward it computes the loss of each row, and on request its entropy.

loss=logprob computes log p[label] instead, with p = softmax(logits / temperature). With mode=train the gradients are
those of a sum over rows: an upstream gradient times log p[label] and, with entropy=true, another one times the entropy.
"""

from tpbench.workloads.linear_loss.problem import WORKLOAD as WORKLOAD
from tpbench.workloads.linear_loss.problem import LinearLoss as LinearLoss
