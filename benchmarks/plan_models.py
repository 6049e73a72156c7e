"""The models that ``plan_steps.py`` makes steps of."""

from __future__ import annotations

from typing import Any

_TINY = {"vocab_size": 3000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
_ALL_HEADS = _TINY | {"num_key_value_heads": 4}
_GLM = _TINY | {"head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6}
    | {"num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3": {"vocab_size": 32000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5}
    | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 8000, "n_embd": 512, "n_layer": 6, "n_head": 8, "attn_pdrop": 0.0}
    | {"bos_token_id": None, "eos_token_id": None},
    "vit": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8},
    "mistral": {"vocab_size": 12000, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 4}
    | {"num_attention_heads": 10, "num_key_value_heads": 5, "sliding_window": None},
    "qwen2": {"vocab_size": 20000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4}
    | {"num_attention_heads": 12, "num_key_value_heads": 2},
    "gemma2": {"vocab_size": 24000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "attn_implementation": "eager"},
    "qwen3_moe": {"vocab_size": 4000, "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "mixtral": {"vocab_size": 4000, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 3}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8},
    "qwen2_moe": {"vocab_size": 4000, "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    | {"shared_expert_intermediate_size": 768},
}
TINY_FAMILIES: dict[str, dict[str, Any]] = {
    "glm": _GLM,
    "glm4": _GLM,
    "olmo2": _TINY,
    "olmo3": _TINY,
    "exaone4": _TINY,
    "gpt_neox": _ALL_HEADS,
    "cohere": _TINY,
    "cohere2": _TINY | {"sliding_window": 64, "num_hidden_layers": 4},
    "phi": _ALL_HEADS,
    "phi3": _TINY,
    "stablelm": _TINY | {"use_parallel_residual": True},
    "nemotron": _TINY,
    "starcoder2": _TINY,
    "seed_oss": _TINY | {"head_dim": 64},
    "helium": _TINY | {"head_dim": 64},
    "ernie4_5": _TINY,
    "granite": _TINY,
    "smollm3": _TINY,
    "opt": _TINY | {"ffn_dim": 704, "word_embed_proj_dim": 256, "dropout": 0.1},
}
_TINY_IMAGES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGE_FAMILIES: dict[str, dict[str, Any]] = {
    "dinov2": _TINY_IMAGES | {"image_size": 518},
    "dinov2_with_registers": _TINY_IMAGES | {"image_size": 518, "patch_size": 14},
    "deit": _TINY_IMAGES | {"intermediate_size": 1024},
    "vit_msn": _TINY_IMAGES | {"intermediate_size": 1024},
    "ijepa": _TINY_IMAGES | {"intermediate_size": 1024},
}
# Of an image of 224 x 224: patches, and what is put before them.
IMAGE_TOKENS = {"vit": 197, "dinov2": 257, "dinov2_with_registers": 261, "deit": 198, "vit_msn": 197, "ijepa": 196}
FAMILIES |= TINY_FAMILIES | IMAGE_FAMILIES
# Of which a trace was looked at before the rules were finished; the other tiny ones first ran after that.
WRITTEN_WITH = {"glm", "glm4", "olmo2", "olmo3", "exaone4", "gpt_neox", "cohere", "cohere2"}
WRITTEN_WITH |= {"nemotron", "helium", "ernie4_5", "opt"}
_TALKER = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
_DIA = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
_DIA_CROSS = {"cross_num_attention_heads": 8, "cross_num_key_value_heads": 8, "cross_head_dim": 32}
SPEECH: dict[str, dict[str, Any]] = {
    "qwen3_tts": {"im_start_token_id": 256, "im_end_token_id": 257, "tts_pad_token_id": 259, "tts_bos_token_id": 260}
    | {"tts_eos_token_id": 261, "tts_model_type": "base", "tts_model_size": "tiny"}
    | {
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "talker_config": _TALKER
        | {"vocab_size": 3072, "hidden_size": 256, "intermediate_size": 704, "head_dim": 64, "hidden_act": "silu"}
        | {"max_position_embeddings": 1024, "initializer_range": 0.02, "rms_norm_eps": 1e-6, "rope_theta": 1000000}
        | {"attention_bias": False, "attention_dropout": 0, "text_vocab_size": 2000, "text_hidden_size": 256}
        | {"num_code_groups": 8, "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150}
        | {"codec_think_id": 2154, "codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157}
        | {"codec_language_id": {"english": 2050}, "spk_id": {}, "spk_is_dialect": {}}
        | {
            "code_predictor_config": {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512}
            | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
            | {"hidden_act": "silu", "max_position_embeddings": 512, "initializer_range": 0.02, "rms_norm_eps": 1e-6}
            | {"rope_theta": 1000000, "attention_bias": False, "attention_dropout": 0, "num_code_groups": 8}
        },
        "speaker_encoder_config": {"enc_dim": 256, "enc_channels": [64, 64, 64, 64, 192], "enc_res2net_scale": 4}
        | {"enc_attention_channels": 16, "enc_se_channels": 16},
    },
    "csm": _TALKER
    | {"num_codebooks": 6, "vocab_size": 1027, "text_vocab_size": 4000, "hidden_size": 384, "head_dim": 48}
    | {"intermediate_size": 1024, "max_position_embeddings": 1024, "tie_codebooks_embeddings": True}
    | {"codebook_pad_token_id": 1026, "codebook_eos_token_id": 0, "audio_token_id": 268, "audio_eos_token_id": 269}
    | {
        "pad_token_id": 267,
        "bos_token_id": 266,
        "depth_decoder_config": {"num_codebooks": 6, "backbone_hidden_size": 384, "vocab_size": 1027}
        | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 7},
        "codec_config": {"model_type": "mimi", "hidden_size": 32, "num_filters": 4, "codebook_size": 1024}
        | {"codebook_dim": 16, "vector_quantization_hidden_dimension": 16, "num_quantizers": 6}
        | {"num_semantic_quantizers": 1, "upsample_groups": 32, "num_hidden_layers": 1, "intermediate_size": 64}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "upsampling_ratios": [8, 6, 5, 4]},
    },
    "dia": {
        "delay_pattern": [0, 2, 3, 4],
        "encoder_config": _DIA
        | {"model_type": "dia_encoder", "max_position_embeddings": 256, "num_hidden_layers": 3, "hidden_size": 256}
        | {"intermediate_size": 768, "vocab_size": 256},
        "decoder_config": _DIA
        | _DIA_CROSS
        | {"model_type": "dia_decoder", "max_position_embeddings": 1024, "num_hidden_layers": 4, "hidden_size": 384}
        | {"intermediate_size": 1024, "cross_hidden_size": 256, "vocab_size": 1028, "num_channels": 4}
        | {"eos_token_id": 1024, "pad_token_id": 1025, "bos_token_id": 1026},
    },
}
_TTS: Any = SPEECH["qwen3_tts"]
_REAL = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072}
SPEECH["qwen3_tts_0p6b"] = _TTS | {
    "model_type": "qwen3_tts",
    "talker_config": _TTS["talker_config"]
    | {"hidden_size": 1024, "num_hidden_layers": 28, "text_vocab_size": 151936, "text_hidden_size": 2048}
    | {"num_code_groups": 16, **_REAL}
    | {
        "code_predictor_config": _TTS["talker_config"]["code_predictor_config"]
        | {"hidden_size": 1024, "num_hidden_layers": 5, "num_code_groups": 16, **_REAL}
    },
    "speaker_encoder_config": {"enc_dim": 1024},
}
LARGE: dict[str, dict[str, Any]] = {  # shapes of Qwen3 0.6B, Llama 3 8B, ViT-L and DINOv2-L
    "qwen3": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8},
    "llama": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32},
    "vit": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    "dinov2": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
}
