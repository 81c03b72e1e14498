"""The problem that the train step solves: the model, the batch, the optimizer, and options of the computation."""

from dataclasses import dataclass
from typing import Literal

from tpbench.settings import setting

Dtype = Literal["bfloat16", "float16", "float32"]
PHASES = ("forward", "backward", "optimizer")
"""The phases of a step."""
ARCHITECTURE = (
    "architecture", "hidden_size", "ffn_size", "layers", "heads", "kv_heads", "head_dim", "vocab", "tied", "rope_theta",
    "rope_factor", "norm_eps",
)  # fmt: skip
"""Fields that the name of a model implies."""


@dataclass(frozen=True)
class TrainStep:
    """One training problem.

    The first block of fields describes the model. A file of conf/model or the config.json of a local folder sets it.
    """

    model: str = setting(help="name of the model")
    architecture: str = setting(help="model type as the transformers package calls it", column=False)
    hidden_size: int = setting(help="width of the residual stream", low=1, column=False)
    ffn_size: int = setting(help="width of the feed-forward layer", low=1, column=False)
    layers: int = setting(help="decoder layers of the model as published", low=1, column=False)
    heads: int = setting(help="query heads", low=1, column=False)
    kv_heads: int = setting(help="key-value heads", low=1, column=False)
    head_dim: int = setting(help="width of a head", low=2, column=False)
    vocab: int = setting(help="rows of the embedding, columns of the logits", low=2, high=2**20, column=False)
    tied: bool = setting(False, help="whether the embedding's weight is the head's too", column=False)
    rope_theta: float = setting(1e4, help="base of the rotary embedding", low=1.0, column=False)
    rope_factor: float = setting(1.0, help="Llama 3's scaling of the rotary embedding; 1: none", low=1.0, column=False)
    norm_eps: float = setting(1e-6, help="epsilon of the RMS norms", low=0.0, column=False)
    model_dir: str | None = setting(None, help="folder with a config.json of the model instead", column=False)
    config_hash: str | None = setting(None, help="hash of that config.json, computed by tpbench; it cannot be set")
    num_layers: int | None = setting(None, help="decoder layers to train; null or 0: all layers of the model", low=0)

    batch_size: int = setting(1, help="sequences of a replica in one micro-batch", low=1)
    seq_length: int = setting(2048, help="tokens of a sequence", low=2)
    accumulate: int = setting(1, help="micro-batches whose gradients add up to one update", low=1)
    batches: int | None = setting(1, help="batches that the steps repeat in order; null: each has a new one", low=1)
    steps: int = setting(20, help="measured steps, each with its update", low=1)
    warmup_steps: int = setting(5, help="steps before the measured steps", low=0)
    learning_rate: float = setting(1e-5, help="AdamW's learning rate, constant", low=0.0)
    weight_decay: float = setting(0.01, help="AdamW's decay, of all parameters", low=0.0)
    max_grad_norm: float | None = setting(1.0, help="gradients are scaled down to this norm; null: never", low=1e-6)
    dtype: Dtype = setting("bfloat16", help="dtype of all tensors and of the computation; float16 sets autocast=true")
    autocast: bool = setting(False, help="parameters and states in fp32, matrix products in dtype by torch.autocast")
    seed: int = setting(42, help="seed of initial weights and tokens", low=0, high=2**31 - 1)

    attention: Literal["sdpa", "flash_attention_2", "eager"] = setting(
        "sdpa", help="implementation of attention", option="skipped"
    )
    activation_checkpointing: bool = setting(False, help="recompute each layer from its input", option="skipped")
    compile: bool = setting(False, help="compile each decoder layer with torch.compile (needs a GPU)", option="skipped")
    zero_stage: Literal[0, 1, 2] = setting(1, help="DeepSpeed's ZeRO stage (autotp)", option="ignored")
    overlap: bool = setting(False, help="all-reduces beside products, by DeepSpeed (autotp)", option="ignored")
    vocab_parallel: bool = setting(True, help="loss of sharded logits; false: gather all logits", option="ignored")
    train_loss: Literal["torch", "compiled", "liger", "tpbench", "tpbench_linear"] = setting(
        "torch",
        help="cross-entropy: the variant's own (torch), compiled by torch.compile, or of liger or tpbench; "
        "tpbench_linear: of head and loss, without logits",
        option="skipped",
    )

    log_interval: int = setting(10, help="steps between two lines of progress; 0: none", low=0, column=False, in_key=5)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of one replica."""
        return self.batch_size * self.seq_length

    @property
    def title(self) -> str:
        """Name and kind of the model, for messages."""
        return f"{self.model} ({self.architecture})"

    @property
    def depth(self) -> int:
        """Number of decoder layers that are trained."""
        return self.num_layers or self.layers

    @property
    def stored_dtype(self) -> Dtype:
        """Dtype of parameters, gradients and optimizer states."""
        return "float32" if self.autocast else self.dtype

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return one message for each combination of fields that cannot be trained on this mesh."""
        complaints = (
            (self.heads % self.kv_heads, f"kv_heads={self.kv_heads} must divide heads={self.heads}"),
            (self.depth > self.layers, f"num_layers={self.num_layers} is more than the {self.layers} of {self.model}"),
            (self.head_dim % 2, f"head_dim={self.head_dim} must be even: rotary embeddings rotate pairs of numbers"),
            (self.autocast and self.dtype == "float32", "autocast=true needs dtype=bfloat16 or float16"),
            (self.dtype == "float16" and not self.autocast, "dtype=float16 needs autocast=true: moments round to 0"),
            (
                self.attention == "flash_attention_2" and self.dtype == "float32",
                "attention=flash_attention_2 has no float32",
            ),
        )
        return [complaint for holds, complaint in complaints if holds]
