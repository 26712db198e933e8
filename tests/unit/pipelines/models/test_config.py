import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.models.config import (
    DecoderConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    YarnRopeScaling,
    parse_config,
    read_config,
)
from pipelines.models.foreign_config import ForeignConfig
from pronghorn.errors import ConfigurationError

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


def test_what_a_checkpoint_leaves_out_is_derived() -> None:
    config = of("LlamaForCausalLM")
    assert (config.head_dim, config.rope_theta, config.rope_scaling) == (16, 50000.0, None)
    assert not config.tied_embeddings
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm)
    assert (config.windows, config.rotary) == ((None, None), (True, True))
    assert parse_config({k: v for k, v in RAW.items() if k != "num_key_value_heads"}).num_kv_heads == 4


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rope_is_read_in_the_spelling_of_transformers_4_and_5(field: str) -> None:
    assert of("LlamaForCausalLM", **{field: LLAMA3}).rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 128)
    linear = {"type": "linear", "factor": 2.0}
    assert of("LlamaForCausalLM", **{field: linear}).rope_scaling == LinearRopeScaling(2.0)


def test_rope_theta_may_be_nested() -> None:
    assert of("LlamaForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0


def of(architecture: str, **changes: Any) -> DecoderConfig:
    config = parse_config(RAW | {"architectures": [architecture]} | changes)
    assert isinstance(config, DecoderConfig)
    return config


def test_another_architecture_is_read_in_whatever_spelling() -> None:
    raw = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
    config = parse_config(raw | {"vocab_size": 100})
    assert config == ForeignConfig("GPT2LMHeadModel", 100, 3, 4, 4, 16, 128, (None,) * 3)
    with pytest.raises(ConfigurationError, match="GPT2LMHeadModel.* n_layer "):
        parse_config({key: value for key, value in raw.items() if key != "n_layer"} | {"vocab_size": 100})


def test_qwen2_has_biases_that_its_config_does_not_mention() -> None:
    config = of("Qwen2ForCausalLM")
    assert (config.qkv_bias, config.output_bias) == (True, False)


def test_windows_are_where_each_family_has_them() -> None:
    long = {"max_position_embeddings": 8192, "num_hidden_layers": 4}
    assert of("MistralForCausalLM", **long).windows == (4096,) * 4
    assert of("MistralForCausalLM", **long, sliding_window=None).windows == (None,) * 4
    assert of("Qwen2ForCausalLM", **long, max_window_layers=2).windows == (None,) * 4
    on = {"use_sliding_window": True, "sliding_window": 100}
    assert of("Qwen2ForCausalLM", **long, **on, max_window_layers=2).windows == (None, None, 100, 100)
    assert of("Qwen3ForCausalLM", **long, **on, layer_types=["sliding_attention", "full_attention"] * 2).windows == (
        (100, None, 100, None)
    )
    config = of("SmolLM3ForCausalLM", **long, **on)
    assert (config.windows, config.rotary) == ((None, None, None, 100), (True, True, True, False))


def test_yarn_takes_what_it_is_not_told_from_the_model() -> None:
    scaling = of("LlamaForCausalLM", rope_scaling={"rope_type": "yarn", "factor": 2.0}).rope_scaling
    assert isinstance(scaling, YarnRopeScaling)
    assert (scaling.original_max_positions, scaling.beta_fast, scaling.beta_slow) == (512, 32.0, 1.0)
    assert scaling.attention_factor == pytest.approx(1.0693, abs=1e-4)


@pytest.mark.field("ROCm/ATOM#2154")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM.*not a decoder"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "T5.*encoder"),
        ({"architectures": ["MambaForCausalLM"], "state_size": 16}, "Mamba.*recurrent state"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "DeepseekV3.*compressed"),
        ({"architectures": ["JambaForCausalLM"], "layer_types": ["mamba", "full_attention"]}, "Jamba.*'mamba'"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}}, "Phi3.*'longrope'"),
        ({"architectures": ["PhiForCausalLM"], "quantization_config": {"quant_method": "awq"}}, "Phi.*awq"),
        ({"architectures": ["PhiForCausalLM"], "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"sliding_window": 128}, "128"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window: 0"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0, 1]}, "no_rope_layers has 3 entries"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse_config(RAW | changes)


def test_a_window_that_is_off_or_never_reached_is_fine() -> None:
    parse_config(RAW | {"sliding_window": 128, "use_sliding_window": False})
    parse_config(RAW | {"sliding_window": 512})


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "{}", json.dumps(RAW | {"hidden_size": "wide"})])
def test_a_missing_or_damaged_file_is_one_clear_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=str(tmp_path)) as caught:
        read_config(tmp_path)
    assert "\n" not in caught.value.message


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in RAW.items() if k != "vocab_size"}))
    with pytest.raises(ConfigurationError, match="vocab_size"):
        read_config(tmp_path)
