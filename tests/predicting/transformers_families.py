"""Small models of many families of Transformers, each as a workload ready to be measured and predicted."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from memlab import Workload

_WORDS, _ROWS, _POSITIONS = 100, 4, 32
# no layer is skipped at random, or a step would not be like the next one
_NO_SKIPS = {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
_COMMON = {
    "vocab_size": _WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ENCODER_DECODER = {
    "vocab_size": _WORDS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_VISION = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip

Batch = Mapping[str, Any]


def _words(positions: int = _POSITIONS) -> torch.Tensor:
    return torch.randint(3, _WORDS, (_ROWS, positions))


def _pixels() -> torch.Tensor:
    return torch.randn(_ROWS, 3, 32, 32)


def _language() -> Batch:
    words = _words()
    return {"input_ids": words, "labels": words}


def _classes() -> Batch:
    return {"input_ids": _words(), "labels": torch.randint(0, 2, (_ROWS,))}


def _padded() -> Batch:
    lengths = torch.tensor([[_POSITIONS], [20], [_POSITIONS], [7]])
    mask = (torch.arange(_POSITIONS) < lengths).long()
    words = _words()
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def _pictures() -> Batch:
    return {"pixel_values": _pixels(), "labels": torch.randint(0, 5, (_ROWS,))}


def _maps() -> Batch:
    return {"pixel_values": _pixels(), "labels": torch.randint(0, 5, (_ROWS, 32, 32))}


def _pairs() -> Batch:
    return {"input_ids": _words(16), "pixel_values": _pixels(), "return_loss": True}


def _captions() -> Batch:
    words = _words(16)
    return {"input_ids": words, "labels": words, "pixel_values": _pixels()}


def _pictures_in_words() -> Batch:
    words = torch.cat([torch.full((_ROWS, 16), 99), torch.randint(3, 98, (_ROWS, 16))], 1)
    return {"input_ids": words, "labels": words, "pixel_values": _pixels()}


def _speech() -> Batch:
    return {"input_values": torch.randn(_ROWS, 1600), "labels": torch.randint(1, _WORDS, (_ROWS, 5))}


def _spectra() -> Batch:
    return {"input_features": torch.randn(_ROWS, 16, 32), "labels": _words(8)}


def _series() -> Batch:
    return {"past_values": torch.randn(_ROWS, 32, 2), "future_values": torch.randn(_ROWS, 8, 2)}


# model, options of its configuration beside `_COMMON`, and what it is trained on
_COMMON_FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[], Batch]]] = {
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 2}, _language),
    "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 2, "num_local_experts": 4}, _language),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}, _padded),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
        _language,
    ),
    "phi": ("PhiForCausalLM", {}, _language),
    "phi-3": ("Phi3ForCausalLM", {"num_key_value_heads": 2}, _language),
    "gemma": ("GemmaForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}, _language),
    "gemma-2": ("Gemma2ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}, _language),
    "gpt-neox": ("GPTNeoXForCausalLM", {}, _language),
    "falcon": ("FalconForCausalLM", {}, _language),
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4}, _padded),
    "opt": ("OPTForCausalLM", {"ffn_dim": 128, "word_embed_proj_dim": 64}, _language),
    "gpt-j": ("GPTJForCausalLM", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}, _language),
    "mamba": ("MambaForCausalLM", {"state_size": 8}, _language),
    "mamba-2": (
        "Mamba2ForCausalLM",
        {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
        _language,
    ),
    "rwkv": ("RwkvForCausalLM", {"attention_hidden_size": 64, "context_length": 64}, _language),
    "olmo": ("OlmoForCausalLM", {}, _language),
    "starcoder-2": ("Starcoder2ForCausalLM", {"num_key_value_heads": 2}, _language),
    "electra": ("ElectraForMaskedLM", {"embedding_size": 32}, _language),
    "roberta": ("RobertaForMaskedLM", {}, _padded),
    "deberta-v2": (
        "DebertaV2ForSequenceClassification",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
        _classes,
    ),
    "albert": ("AlbertForMaskedLM", {"embedding_size": 32}, _language),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}, _language),
    "big-bird": ("BigBirdForMaskedLM", {"attention_type": "original_full"}, _language),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {
            **_NO_SKIPS, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
            "apply_spec_augment": False,
        },
        _speech,
    ),
}  # fmt: skip

# likewise, with all options of the configuration
_OTHER_FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[], Batch]]] = {
    "xlnet": (
        "XLNetForSequenceClassification",
        {"vocab_size": _WORDS, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
        _classes,
    ),
    "bart": ("BartForConditionalGeneration", _ENCODER_DECODER, _language),
    "pegasus": ("PegasusForConditionalGeneration", _ENCODER_DECODER, _language),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**_ENCODER_DECODER, "max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 16},
        _spectra,
    ),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
            "window_size": 4, "num_labels": 5,
        },
        _pictures,
    ),
    "deit": ("DeiTForImageClassification", {**_VISION, "num_labels": 5}, _pictures),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_labels": 5},
        _pictures,
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic", "num_labels": 5},
        _pictures,
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {
            "depths": [1, 1, 1, 1], "sr_ratios": [4, 2, 1, 1], "hidden_sizes": [8, 16, 16, 16],
            "num_attention_heads": [1, 2, 2, 2], "mlp_ratios": [2, 2, 2, 2], "decoder_hidden_size": 16, "num_labels": 5,
        },
        _maps,
    ),
    "clip": (
        "CLIPModel",
        {
            "text_config": {**_COMMON, "projection_dim": 16}, "vision_config": {**_VISION, "projection_dim": 16},
            "projection_dim": 16,
        },
        _pairs,
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "vision_config": transformers.CLIPVisionConfig(**_VISION),
            "text_config": transformers.LlamaConfig(**_COMMON, num_key_value_heads=2),
            "image_token_index": 99, "image_token_id": 99, "vision_feature_layer": -1,
        },
        _pictures_in_words,
    ),
    "blip": (
        "BlipForConditionalGeneration",
        {"text_config": {**_COMMON, "encoder_hidden_size": 64, "sep_token_id": 2}, "vision_config": _VISION},
        _captions,
    ),
    "patch-tst": (
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "num_hidden_layers": 2,
            "d_model": 32, "num_attention_heads": 4, "ffn_dim": 64, "prediction_length": 8,
        },
        _series,
    ),
    "m2m-100": ("M2M100ForConditionalGeneration", {**_ENCODER_DECODER, **_NO_SKIPS}, _language),
    "sew": (
        "SEWForCTC",
        {
            **_COMMON, **_NO_SKIPS, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
            "squeeze_factor": 2, "apply_spec_augment": False,
        },
        _speech,
    ),
}  # fmt: skip

FAMILIES = {
    **{name: (model, {**_COMMON, **options}, batch) for name, (model, options, batch) in _COMMON_FAMILIES.items()},
    **_OTHER_FAMILIES,
}


def workload_of(name: str) -> Workload:
    """The workload of a family, the same one every time."""
    random.seed(0)
    torch.manual_seed(0)
    model_name, options, batch = FAMILIES[name]
    kind = getattr(transformers, model_name)
    model = kind(kind.config_class(**options)).train()
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch())
