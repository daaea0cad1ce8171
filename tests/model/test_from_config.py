"""config.json -> ModelSpec, against transformers' own reading of the same file."""

from __future__ import annotations

import json

import pytest
import torch

from quatrain.errors import ModelError
from quatrain.model.from_config import spec_from_config
from quatrain.model.rope import inverse_frequencies
from quatrain.model.spec import RopeSpec

TOY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def toy(model_type: str = "llama", **changes) -> dict:
    config = {"model_type": model_type, **TOY, **changes}
    return {key: value for key, value in config.items() if value != "absent"}


def saved_by_transformers(model_type: str, tmp_path, **changes) -> dict:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    transformers.AutoConfig.for_model(model_type, **{**TOY, **changes}).save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_saved_by_transformers(family, tmp_path):
    spec = spec_from_config(saved_by_transformers(family, tmp_path, rms_norm_eps=1e-5, tie_word_embeddings=True))
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (family, 99, 32, 48)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (4, 4, 2)
    assert spec.head_dim == (128 if family == "qwen3" else 8)
    assert spec.rms_norm_eps == 1e-5 and spec.tie_word_embeddings
    assert spec.rope == RopeSpec(10000.0, spec.head_dim)
    assert spec.biased == (frozenset({"q_proj", "k_proj", "v_proj"}) if family == "qwen2" else frozenset())
    assert spec.qk_norm == (family == "qwen3")
    assert spec.windows == ((4096,) * 4 if family == "mistral" else (None,) * 4)


def test_biases_of_llama_and_qwen3():
    """J7: which linears have a bias."""
    assert spec_from_config(toy(attention_bias=True)).biased == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert spec_from_config(toy(mlp_bias=True)).biased == {"gate_proj", "up_proj", "down_proj"}
    assert spec_from_config(toy("qwen3", attention_bias=True)).biased == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("family", "changes", "want"),
    [
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {"sliding_window": 4}, (4,) * 4),
        ("mistral", {}, (4096,) * 4),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": False}, (None,) * 4),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4)),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True}, (None,) * 4),
        (
            "qwen3",
            {
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (4, None, 4, None),
        ),
        ("llama", {"layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_j10_sliding_windows(family, changes, want):
    """J10: which layers have a window, by the rules of each family."""
    assert spec_from_config(toy(family, **changes)).windows == want


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"sliding_window": 4}, "sliding_window = 4"),
        ("mistral", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}, "same window"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "no sliding window is in use"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "list of 4 names"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"] * 2}, "linear_attention"),
    ],
)
def test_windows_that_are_refused(family, changes, said):
    with pytest.raises(ModelError, match=said):
        spec_from_config(toy(family, **changes))


def test_j2_old_and_new_spellings_of_the_rope_block():
    """J2: every spelling of one block is one thing; an unknown kind is refused."""
    old = spec_from_config(toy(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4})).rope
    new = spec_from_config(toy(rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 4.0})).rope
    newest = spec_from_config(toy(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0})).rope
    assert old == new == newest == RopeSpec(5e5, 8, "linear", factor=4.0)
    plain = [spec_from_config(toy(rope_scaling=block)).rope for block in (None, {}, {"rope_type": "default"})]
    assert plain == [RopeSpec(10000.0, 8)] * 3
    with pytest.raises(
        ModelError, match="'spiral' is not supported; supported: default, linear, dynamic, llama3, yarn"
    ):
        spec_from_config(toy(rope_scaling={"rope_type": "spiral"}))


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"factor": 4.0}, "rope_type is missing"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": -1}, "factor: want a number above 0, got -1"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing; high_freq_factor is missing"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "disagree"),
        ({"rope_type": "default", "mrope_section": [2, 1, 1]}, "unknown keys mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported"),
        ("yes", "want an object or null"),
        ({"rope_type": "default", "rope_theta": 5.0}, "rope_theta is 10000.0 at the top and 5.0"),
    ],
)
def test_rope_blocks_that_are_refused(block, said):
    with pytest.raises(ModelError, match=said):
        spec_from_config(toy(rope_theta=10000.0, rope_scaling=block))


@pytest.mark.parametrize(
    "block",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 1.0, "attention_factor": None},
    ],
)
def test_rope_frequencies_equal_those_of_the_same_file_in_transformers(block, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = saved_by_transformers("llama", tmp_path, rope_parameters={"rope_theta": 500000.0, **block})
    rotary = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    got, scaling = inverse_frequencies(spec_from_config(config).rope, 1)
    assert torch.equal(got, rotary.inv_freq) and scaling == rotary.attention_scaling


def test_j5_partial_rotary():
    """J5: the share of a head that turns; odd and impossible ones are refused."""
    assert spec_from_config(toy(partial_rotary_factor=0.5)).rope.rotary_dim == 4
    assert spec_from_config(toy(rope_parameters={"partial_rotary_factor": 0.5})).rope.rotary_dim == 4
    with pytest.raises(ModelError, match="3 rotary dimensions of a head of 8"):
        spec_from_config(toy(partial_rotary_factor=0.4))
    with pytest.raises(ModelError, match="16 rotary dimensions of a head of 8"):
        spec_from_config(toy(partial_rotary_factor=2.0))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "mamba2", "brand_new"])
def test_j12_unknown_architectures(name):
    """J12: refused with what it would take and what is supported."""
    with pytest.raises(ModelError, match=f"architecture '{name}' is not supported.*supported: Llama.*Mistral.*Qwen3"):
        spec_from_config(toy(name))
    with pytest.raises(ModelError, match="would need a router and a mixture of experts"):
        spec_from_config(toy("any_moe"))


def test_j12_missing_architecture_or_another_head():
    """J12: no model_type, or a model that is no language model."""
    with pytest.raises(ModelError, match=r"model_type is missing.*supported: Llama"):
        spec_from_config(TOY)
    with pytest.raises(ModelError, match="LlamaForSequenceClassification has another head"):
        spec_from_config(toy(architectures=["LlamaForSequenceClassification"]))


@pytest.mark.parametrize(
    ("family", "key", "read", "want"),
    [
        ("llama", "num_key_value_heads", lambda s: s.num_kv_heads, 4),
        ("llama", "rms_norm_eps", lambda s: s.rms_norm_eps, 1e-6),
        ("llama", "rope_theta", lambda s: s.rope.theta, 10000.0),
        ("llama", "head_dim", lambda s: s.head_dim, 8),
        ("qwen3", "head_dim", lambda s: s.head_dim, 128),
        ("llama", "max_position_embeddings", lambda s: s.max_position_embeddings, 2048),
        ("mistral", "max_position_embeddings", lambda s: s.max_position_embeddings, 131072),
    ],
)
def test_j13_absent_keys_take_the_documented_default_and_say_so(family, key, read, want):
    """J13: what is absent takes its family's default, and a note says so."""
    notes: list[str] = []
    spec = spec_from_config(toy(family, **{key: "absent"}), notes=notes)
    assert read(spec) == want
    assert any(note.startswith(f"{key} is not in config.json: taking the default") for note in notes)
    assert any(note.startswith("hidden_act") for note in notes)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_j13_sizes_have_no_default(key):
    """J13: a size that is absent is an error."""
    with pytest.raises(ModelError, match=f"{key} is missing"):
        spec_from_config(toy(**{key: "absent"}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": -1}, "vocab_size: want an integer of at least 1, got -1"),
        ({"vocab_size": True}, "vocab_size: want an integer"),
        ({"hidden_size": "32"}, "hidden_size: want an integer of at least 1, got '32'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: want a number above 0"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"hidden_size": 33}, "head_dim is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: want true or false"),
        ({"attention_dropout": 0.1}, "dropout inside attention"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0"),
        ({"residual_multiplier": 0}, "residual_multiplier = 0"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"rope_interleaved": True}, "rope_interleaved"),
    ],
)
def test_values_that_are_refused(changes, said):
    """J13: vocabulary -1 and the like, with the key. J12: parts of other architectures."""
    with pytest.raises(ModelError, match=said):
        spec_from_config(toy(**changes))


def test_keys_that_do_not_touch_the_maths_are_ignored():
    """J13: torch_dtype and dtype alike do not matter, since each tensor says its own."""
    harmless = {"_name_or_path": "x", "torch_dtype": "bfloat16", "dtype": "float32", "use_cache": False}
    harmless |= {"logit_scale": 1.0, "final_logit_softcapping": None, "num_experts": 0, "is_llama_config": True}
    harmless |= {
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "architectures": ["LlamaForCausalLM"],
    }
    assert spec_from_config(toy(**harmless)) == spec_from_config(toy())


def test_all_problems_are_reported_at_once():
    with pytest.raises(ModelError) as caught:
        spec_from_config(
            toy(vocab_size=-1, hidden_act="gelu", rope_scaling={"type": "spiral"}, intermediate_size="absent")
        )
    for said in ("vocab_size", "gelu", "spiral", "intermediate_size is missing"):
        assert said in str(caught.value)
