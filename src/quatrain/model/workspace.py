"""The working memory of a block: what its backward needs, and the gradients inside it. Slots for the plan, views for
a step.

Legend: T tokens of the packed stream, H hidden, Hq/Hk query and key/value heads, D head_dim, I intermediate, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from quatrain.memory.arena import Arena
from quatrain.memory.plan import Slot
from quatrain.model.spec import LINEARS, ModelSpec
from quatrain.ops.select import Sizes

ALWAYS = ("normed", "rstd", "q", "k", "v", "attn", "lse", "mid", "post_normed", "post_rstd", "gate", "up", "act")
"""The intermediates that every family has."""


@dataclass
class Intermediates:
    """What a block's backward needs besides the block's input. `u` holds the adapters' down projections by linear
    name."""

    normed: torch.Tensor  # [T, H]
    rstd: torch.Tensor  # [T]
    q: torch.Tensor  # [T, Hq, D]
    k: torch.Tensor  # [T, Hk, D]
    v: torch.Tensor  # [T, Hk, D]
    q_raw: torch.Tensor | None  # [T, Hq, D] before the per-head norm
    k_raw: torch.Tensor | None  # [T, Hk, D]
    q_rstd: torch.Tensor | None  # [T * Hq]
    k_rstd: torch.Tensor | None  # [T * Hk]
    attn: torch.Tensor  # [T, Hq, D]
    lse: torch.Tensor  # [T, Hq]
    mid: torch.Tensor  # [T, H]
    post_normed: torch.Tensor  # [T, H]
    post_rstd: torch.Tensor  # [T]
    gate: torch.Tensor  # [T, I]
    up: torch.Tensor  # [T, I]
    act: torch.Tensor  # [T, I]
    u: dict[str, torch.Tensor]  # [T, r]

    def tensors(self) -> Iterator[torch.Tensor]:
        for value in vars(self).values():
            if isinstance(value, dict):
                yield from value.values()
            elif value is not None:
                yield value


@dataclass
class BackwardScratch:
    """Gradients that live only inside one block's backward; one set serves all blocks."""

    d_normed: torch.Tensor  # [T, H]
    d_mid: torch.Tensor  # [T, H]
    d_q: torch.Tensor  # [T, Hq, D]
    d_k: torch.Tensor  # [T, Hk, D]
    d_v: torch.Tensor  # [T, Hk, D]
    d_act: torch.Tensor  # [T, I]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from vars(self).values()


def intermediate_slots(
    spec: ModelSpec,
    ranks: Mapping[str, int],
    tokens: int,
    dtype: torch.dtype,
    wide: torch.dtype,
    group: str,
    prefix: str,
) -> list[Slot]:
    """The arena slots of one `Intermediates` for `tokens` tokens. `ranks` maps adapted linears to their rank."""
    h, i, d, hq, hk = spec.hidden_size, spec.intermediate_size, spec.head_dim, spec.num_heads, spec.num_kv_heads
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "normed": ((tokens, h), dtype),
        "rstd": ((tokens,), wide),
        "q": ((tokens, hq, d), dtype),
        "k": ((tokens, hk, d), dtype),
        "v": ((tokens, hk, d), dtype),
        "attn": ((tokens, hq, d), dtype),
        "lse": ((tokens, hq), wide),
        "mid": ((tokens, h), dtype),
        "post_normed": ((tokens, h), dtype),
        "post_rstd": ((tokens,), wide),
        "gate": ((tokens, i), dtype),
        "up": ((tokens, i), dtype),
        "act": ((tokens, i), dtype),
    }
    if spec.qk_norm:
        shapes["q_raw"] = ((tokens, hq, d), dtype)
        shapes["k_raw"] = ((tokens, hk, d), dtype)
        shapes["q_rstd"] = ((tokens * hq,), wide)
        shapes["k_rstd"] = ((tokens * hk,), wide)
    shapes |= {f"u.{name}": ((tokens, rank), dtype) for name, rank in ranks.items()}
    return [Slot(group, f"{prefix}.{name}", shape, kind) for name, (shape, kind) in shapes.items()]


def scratch_slots(spec: ModelSpec, tokens: int, dtype: torch.dtype, group: str, prefix: str) -> list[Slot]:
    """The arena slots of one `BackwardScratch`."""
    heads, kv_heads = (tokens, spec.num_heads, spec.head_dim), (tokens, spec.num_kv_heads, spec.head_dim)
    hidden, inner = (tokens, spec.hidden_size), (tokens, spec.intermediate_size)
    shapes = {"d_normed": hidden, "d_mid": hidden, "d_q": heads, "d_k": kv_heads, "d_v": kv_heads, "d_act": inner}
    return [Slot(group, f"{prefix}.{name}", shape, dtype) for name, shape in shapes.items()]


def intermediates(slots: Arena, prefix: str, tokens: int, spec: ModelSpec) -> Intermediates:
    """`Intermediates` over the first `tokens` rows of the slots made by `intermediate_slots`."""

    def rows(name: str, per_token: int = 1) -> torch.Tensor:
        return slots[f"{prefix}.{name}"][: tokens * per_token]

    raw = spec.qk_norm
    return Intermediates(
        **{name: rows(name) for name in ALWAYS},
        q_raw=rows("q_raw") if raw else None,
        k_raw=rows("k_raw") if raw else None,
        q_rstd=rows("q_rstd", spec.num_heads) if raw else None,
        k_rstd=rows("k_rstd", spec.num_kv_heads) if raw else None,
        u={name: rows(f"u.{name}") for name in LINEARS if f"{prefix}.u.{name}" in slots},
    )


def backward_scratch(slots: Arena, prefix: str, tokens: int) -> BackwardScratch:
    """`BackwardScratch` over the first `tokens` rows of the slots made by `scratch_slots`."""
    names = ("d_normed", "d_mid", "d_q", "d_k", "d_v", "d_act")
    return BackwardScratch(**{name: slots[f"{prefix}.{name}"][:tokens] for name in names})


GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""The linears of a block that share an input, and go through the op in one call."""


def op_sizes(
    spec: ModelSpec,
    *,
    tokens: int,
    longest_row: int,
    rank: int,
    quantised: bool,
    dropout: bool,
    head_chunk: int,
    dtype: torch.dtype,
) -> Sizes:
    """The largest sizes that any op is called with for this model."""
    return Sizes(
        tokens=tokens,
        longest_row=longest_row,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        vocab=spec.vocab_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        groups=tuple(
            (spec.linear_shape(group[0])[1], tuple(spec.linear_shape(name)[0] for name in group)) for group in GROUPS
        ),
        rank=rank,
        quantised=quantised,
        dropout=dropout,
        head_chunk=head_chunk,
        dtype=dtype,
        wide=torch.promote_types(dtype, torch.float32),
    )
