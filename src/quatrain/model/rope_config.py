"""The rope block of a Hugging Face configuration, in its old and new spellings -> RopeSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quatrain.model.config_values import ConfigValues
from quatrain.model.spec import RopeKind, RopeSpec

DEFAULT_THETA = 10000.0
KINDS: dict[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
}
_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
_KEYS |= {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale"}
_KEYS |= {"mscale_all_dim", "truncate", "finetuned"}


def rope_from_config(config: ConfigValues, head_dim: int, max_position: int) -> RopeSpec:
    """Reads `rope_parameters` (new) or `rope_scaling` + `rope_theta` (old); `type` is an old name of `rope_type`.

    Problems go to `config.problems`: an unknown kind, key or combination, or two spellings that disagree.
    """
    block = _block(config)
    rope = ConfigValues(block, f"{config.where}, rope parameters")
    kind = KINDS.get(_kind_name(rope))
    if kind is None:
        rope.problem(f"rope type {_kind_name(rope)!r} is not supported; supported: {', '.join(KINDS)}")
        kind = "default"
    unknown = sorted(key for key in block.keys() - _KEYS if block[key] is not None)
    if unknown:
        rope.problem(f"unknown keys {', '.join(unknown)}")
    spec = RopeSpec(
        theta=_theta(config, rope),
        rotary_dim=_rotary_dim(config, rope, head_dim, kind),
        kind=kind,
        **_scaling(config, rope, kind, max_position),
    )
    config.problems += rope.problems
    config.notes += rope.notes
    return spec


def _block(config: ConfigValues) -> Mapping[str, Any]:
    """The one rope block in use; {} when there is none."""
    blocks = []
    for name in ("rope_parameters", "rope_scaling"):
        block = config.values.get(name)
        if block is None or block == {}:
            continue
        if not isinstance(block, dict):
            config.problem(f"{name}: want an object or null, got {block!r}")
        elif any(isinstance(value, dict) for value in block.values()):
            config.problem(f"{name}: rope parameters per layer type are not supported")
        else:
            blocks.append(block)
    if len(blocks) == 2 and blocks[0] != blocks[1]:
        config.problem("rope_parameters and rope_scaling disagree")
    return blocks[0] if blocks else {}


def _kind_name(rope: ConfigValues) -> str:
    new, old = rope.values.get("rope_type"), rope.values.get("type")
    if new is not None and old is not None and new != old:
        rope.problem(f"rope_type {new!r} and type {old!r} disagree")
    name = new if new is not None else old
    if name is None and set(rope.values) - {"rope_theta", "partial_rotary_factor"}:
        rope.problem("rope_type is missing")
    return "default" if name is None else str(name)


def _theta(config: ConfigValues, rope: ConfigValues) -> float:
    inside, outside = rope.optional_number("rope_theta"), config.optional_number("rope_theta")
    if inside is not None and outside is not None and inside != outside:
        config.problem(f"rope_theta is {outside} at the top and {inside} in the rope parameters")
    if inside is not None:
        return inside
    return config.number("rope_theta", DEFAULT_THETA)


def _rotary_dim(config: ConfigValues, rope: ConfigValues, head_dim: int, kind: RopeKind) -> int:
    fraction = rope.optional_number("partial_rotary_factor")
    if fraction is None:
        fraction = config.optional_number("partial_rotary_factor")
    dim = head_dim if fraction is None else int(head_dim * fraction)
    smallest = 4 if kind == "dynamic" else 2  # dynamic NTK has the exponent dim / (dim - 2)
    if dim % 2 or not smallest <= dim <= head_dim:
        config.problem(
            f"{dim} rotary dimensions of a head of {head_dim}: want an even number in {smallest}..{head_dim}"
        )
        return smallest
    return dim


def _scaling(config: ConfigValues, rope: ConfigValues, kind: RopeKind, max_position: int) -> dict[str, Any]:
    """The fields of RopeSpec that `kind` uses."""
    if kind == "default":
        return {}
    if kind == "linear":
        return {"factor": rope.number("factor")}
    if kind == "dynamic":
        return {"factor": rope.number("factor"), "original_max_position": max_position}
    name = "original_max_position_embeddings"
    outer = config.values.get(name)
    original = (config if outer is not None else rope).integer(name, max_position)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low == high:
            rope.problem(f"low_freq_factor and high_freq_factor are both {low}: the blend between them is undefined")
        return {
            "factor": rope.number("factor"),
            "original_max_position": original,
            "low_freq_factor": low,
            "high_freq_factor": high,
        }
    return {
        "factor": rope.optional_number("factor") or max_position / original,
        "original_max_position": original,
        "beta_fast": rope.optional_number("beta_fast") or 32.0,
        "beta_slow": rope.optional_number("beta_slow") or 1.0,
        "attention_factor": rope.optional_number("attention_factor"),
        "mscale": rope.optional_number("mscale"),
        "mscale_all_dim": rope.optional_number("mscale_all_dim"),
        "truncate": rope.flag("truncate", True),
    }
