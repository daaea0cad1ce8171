"""What a model is: every number of its configuration that changes the maths, read once, from one source.

`ModelSpec` is built from a Hugging Face `config.json` or from GGUF metadata. Nothing downstream reads a configuration
file again, and no op has a constant of its own for eps, theta or a head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
LINEARS = ATTENTION_LINEARS + MLP_LINEARS


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding parameters. Fields that a kind does not use keep their defaults.

    `rotary_dim` (even, at most head_dim) is how many leading dimensions of a head rotate; pairs are (i, i +
    rotary_dim/2). `freq_factors` are the per-frequency divisors that GGUF files ship instead of the llama3
    parameters.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer of a supported family.

    `windows[l]` is layer l's sliding window in tokens (a query at i sees keys i-window+1 .. i), or None for full causal
    attention. `biased` holds the names of the linears (as in `LINEARS`) that have a bias.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    biased: frozenset[str] = frozenset()
    qk_norm: bool = False

    def linear_shape(self, name: str) -> tuple[int, int]:
        """(out_features, in_features) of one of `LINEARS`."""
        h, i = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (q, h),
            "k_proj": (kv, h),
            "v_proj": (kv, h),
            "o_proj": (h, q),
            "gate_proj": (i, h),
            "up_proj": (i, h),
            "down_proj": (h, i),
        }[name]
