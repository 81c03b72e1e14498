"""The train step's problem: the model, the batch, the optimizer; then the options of how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpbench.settings import setting

Dtype = Literal["bfloat16", "float16", "float32"]
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
NORM_GROWTH = 2.0
"""How many times further apart the gradient norms of equal problems may be with each step: Adam's first updates move
every weight by a whole learning rate, and what rounding made different grows. In bf16 right variants of Qwen3 were
0.2% apart at step 1, up to 3% at step 3 and a quarter at step 4."""
ARCHITECTURE = (
    "architecture", "hidden_size", "ffn_size", "layers", "heads", "kv_heads", "head_dim", "vocab", "tied", "rope_theta",
    "rope_factor", "norm_eps",
)  # fmt: skip
"""Fields that a model's name stands for."""


@dataclass(frozen=True)
class TrainStep:
    """One training problem. The first block describes the architecture: a file of conf/model, or a local folder."""

    model: str = setting(help="name of the model")
    architecture: str = setting(help="model type as the transformers package calls it")
    hidden_size: int = setting(help="width of the residual stream", low=1)
    ffn_size: int = setting(help="width of the feed-forward layer", low=1)
    layers: int = setting(help="decoder layers of the model as published", low=1)
    heads: int = setting(help="query heads", low=1)
    kv_heads: int = setting(help="key-value heads", low=1)
    head_dim: int = setting(help="width of a head", low=2)
    vocab: int = setting(help="rows of the embedding, columns of the logits", low=2, high=2**20)
    tied: bool = setting(False, help="whether the embedding's weight is the head's too")
    rope_theta: float = setting(1e4, help="base of the rotary embedding", low=1.0)
    rope_factor: float = setting(1.0, help="Llama 3's scaling of the rotary embedding; 1: none", low=1.0)
    norm_eps: float = setting(1e-6, help="epsilon of the RMS norms", low=0.0)
    model_dir: str | None = setting(
        None, help="folder with a config.json as the transformers package writes it; replaces `model`"
    )
    config_hash: str | None = setting(None, help="hash of what that config.json says: found, not set")
    num_layers: int | None = setting(None, help="decoder layers; null: all that the model has", low=1)

    batch_size: int = setting(1, help="sequences of a replica in one micro-batch", low=1)
    seq_length: int = setting(2048, help="tokens of a sequence", low=2)
    accumulate: int = setting(1, help="micro-batches whose gradients add up to one update", low=1)
    steps: int = setting(20, help="measured steps, each with its update", low=1)
    warmup_steps: int = setting(5, help="steps before them", low=0)
    learning_rate: float = setting(3e-4, help="AdamW's learning rate, constant", low=0.0)
    weight_decay: float = setting(0.1, help="AdamW's decay, of all parameters", low=0.0)
    max_grad_norm: float | None = setting(1.0, help="gradients are scaled down to this norm; null: never", low=0.0)
    dtype: Dtype = setting("bfloat16", help="dtype of parameters, gradients, optimizer states and computation")
    autocast: bool = setting(False, help="parameters and states in fp32, matrix products in dtype by torch.autocast")
    seed: int = setting(0, help="seed of initial weights and tokens", low=0, high=2**31 - 1)

    attention: Literal["sdpa", "flash_attention_2", "eager"] = setting("sdpa", help="implementation of attention")
    activation_checkpointing: bool = setting(False, help="keep only each layer's input, and compute the rest again")
    compile: bool = setting(False, help="each decoder layer through torch.compile (needs a GPU)")
    zero_stage: Literal[0, 1, 2] = setting(1, help="DeepSpeed's ZeRO stage (autotp)")
    overlap: bool = setting(False, help="DeepSpeed's overlap of tensor-parallel all-reduces with products (autotp)")
    vocab_parallel: bool = setting(True, help="head and loss over the sharded vocabulary; false: all logits gathered")
    train_loss: Literal["torch", "tpbench"] = setting("torch", help="cross-entropy: the variant's own or tpbench's")

    phase_steps: int = setting(3, help="more steps, to time forward, backward and optimizer apart; 0: none", low=0)
    profile: bool = setting(False, help="keep a profiler's trace of one more step")
    log_interval: int = setting(5, help="steps between two lines of progress; 0: none", low=0)

    @property
    def tokens(self) -> int:
        """Tokens of a replica in one micro-batch."""
        return self.batch_size * self.seq_length

    @property
    def depth(self) -> int:
        """Decoder layers that are trained."""
        return self.num_layers or self.layers

    @property
    def stored_dtype(self) -> Dtype:
        """Dtype of parameters and of what the optimizer holds."""
        return "float32" if self.autocast else self.dtype

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """What is wrong with the fields taken together."""
        complaints = []
        if self.kv_heads % tp_size:
            complaints.append(
                f"tp_size={tp_size} must divide the {self.kv_heads} key-value heads of {self.model} "
                f"(valid: {', '.join(str(n) for n in range(1, self.kv_heads + 1) if self.kv_heads % n == 0)})"
            )
        for name, size in (("heads", self.heads), ("ffn_size", self.ffn_size), ("seq_length", self.seq_length)):
            if size % tp_size:
                complaints.append(f"tp_size={tp_size} must divide {name}={size}")
        if self.heads % self.kv_heads:
            complaints.append(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_dim % 2:
            complaints.append(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        if self.depth > self.layers:
            complaints.append(f"num_layers={self.num_layers} is more than the {self.layers} layers of {self.model}")
        if self.max_grad_norm == 0:
            complaints.append("max_grad_norm=0 would leave no gradient: null is for no clipping")
        if self.dtype == "float16" and not self.autocast:
            complaints.append("dtype=float16 needs autocast=true: parameters in fp32 and a scaled loss")
        if self.dtype == "float32" and self.autocast:
            complaints.append("autocast=true needs dtype=bfloat16 or float16: in float32 there is nothing to cast")
        if self.attention == "flash_attention_2" and self.dtype == "float32":
            complaints.append("attention=flash_attention_2 has no float32")
        return complaints
