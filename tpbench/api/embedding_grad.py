"""The types of variants of the embedding gradient: `my_fn(EmbeddingGrad, ExchangeContext) -> Exchange`."""

from tpbench.outside.loading import variant as variant
from tpbench.workloads.embedding_grad.exchanges import Exchange as Exchange
from tpbench.workloads.embedding_grad.exchanges import ExchangeContext as ExchangeContext
from tpbench.workloads.embedding_grad.exchanges import Phase as Phase
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad as EmbeddingGrad
