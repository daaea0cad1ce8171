"""Which linears get an adapter, which ranks make sense, how adapters begin: classes I5, I6, I7, N2 of docs/cases.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quatrain.config import InstructConfig, build
from quatrain.errors import ConfigError
from quatrain.model.adapters import AdapterSet, match_targets, module_name
from quatrain.model.from_config import spec_from_config
from quatrain.model.spec import LINEARS, ModelSpec


def spec(tied: bool = True) -> ModelSpec:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    return spec_from_config({"model_type": "llama", "num_attention_heads": 4, "tie_word_embeddings": tied, **sizes})


def matched(targets: str | list[str], tied: bool = True) -> list[str]:
    return [module_name(layer, linear) for layer, linear in match_targets(spec(tied), targets)]


@pytest.mark.parametrize(
    ("targets", "want"),
    [
        (["q_proj"], [f"model.layers.{layer}.self_attn.q_proj" for layer in range(3)]),
        (r".*layers\.(0|1)\..*q_proj", [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]),
        (r"model\.layers\.2\.mlp\.(up|down)_proj", ["model.layers.2.mlp.up_proj", "model.layers.2.mlp.down_proj"]),
    ],
)
def test_a_list_holds_last_names_and_a_string_is_one_expression(targets: str | list[str], want: list[str]) -> None:
    """I5: lists match exact last names, strings the full name."""
    assert matched(targets) == want


@pytest.mark.parametrize(
    ("targets", "said", "hint"),
    [
        (["proj"], "'proj' names no linear", "_proj"),
        (["q_porj"], "'q_porj' names no linear", "q_proj"),
        (["q_proj", "input_layernorm"], "'input_layernorm' names no linear", "try"),
        ("q_porj", "'q_porj' matches no linear; full names look like", "q_proj"),
        (r".*layers\.7\..*", "matches no linear", "name linears as a list"),
        (r"layers\.0\..*q_proj", "matches no linear", "name linears as a list"),  # part of a name is not the name
        (r"(q_proj", "is not a regular expression", None),
    ],
)
def test_what_matches_nothing_is_an_error_with_near_names(
    targets: str | list[str], said: str, hint: str | None
) -> None:
    """I5: no adapter in silence where none was found, and none on what is no linear."""
    with pytest.raises(ConfigError) as caught:
        matched(targets)
    assert said in str(caught.value) and (hint or "") in (caught.value.hint or "")


@pytest.mark.parametrize("empty", [[], ""])
def test_an_empty_list_is_refused(empty: Any) -> None:
    """I5: no target at all."""
    with pytest.raises(ConfigError, match="lora_targets: want 'all-linear', names"):
        build(InstructConfig, {"lora_targets": empty})


@pytest.mark.parametrize("tied", [True, False])
def test_all_linear_leaves_the_output_head_alone(tied: bool) -> None:
    """I6: tied to the embedding or not, the head gets no adapter, by any of the ways to name targets."""
    assert len(matched("all-linear", tied)) == 3 * len(LINEARS) == len(matched(".*", tied))
    assert not any("lm_head" in name or "embed" in name for name in matched(".*", tied))
    for targets in (["lm_head"], "lm_head"):
        with pytest.raises(ConfigError, match="'lm_head'"):
            matched(targets, tied)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lora_rank", 0), ("lora_rank", -4), ("lora_rank", 1.5), ("lora_alpha", 0), ("lora_rank", "1.5")],
)
def test_ranks_and_scales_that_mean_nothing_are_refused_by_name(name: str, value: Any) -> None:
    """I7: zero, negative and fractional ranks, and alpha 0; one that is too large only warns."""
    with pytest.raises(ConfigError, match=f"{name}: want .*{value}"):
        build(InstructConfig, {name: value})
    assert build(InstructConfig, {"lora_rank": 4096}).lora_rank == 4096


def test_initial_adapters_depend_on_the_seed_alone() -> None:
    """N2: torch's global generator is neither drawn from nor listened to; leaving out targets moves no other tensor."""

    def drawn(seed: int, global_seed: int, targets: str | list[str]) -> dict[str, torch.Tensor]:
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        adapters = AdapterSet(spec(), InstructConfig(lora_rank=2, lora_targets=targets), torch.float32)
        adapters.initialise(seed)
        assert torch.equal(torch.get_rng_state(), state)
        return {name: tensor for name, tensor in adapters.named().items() if "lora_A" in name}

    first, some = drawn(1, 7, "all-linear"), drawn(1, 8, ["v_proj", "up_proj"])
    assert len(some) == 6 and all(torch.equal(tensor, first[name]) for name, tensor in some.items())
    assert not any(torch.equal(tensor, first[name]) for name, tensor in drawn(2, 7, "all-linear").items())
