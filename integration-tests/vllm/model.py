"""A small Llama with random weights, made on the spot: nothing is downloaded.

The weights have a standard deviation of 0.08, so that attention decides about the next token. With the weights of
vLLM's ``load_format="dummy"``, the next token follows from the last one alone, and wrong KV goes unnoticed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 2048
FIRST_WORD = 3


def make_model(folder: Path, *, layers: int = 4, kv_heads: int = 2, head_dim: int = 64) -> None:
    """Write configuration, tokenizer and weights into a folder."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
    }
    torch.manual_seed(7)
    config = LlamaConfig(
        **sizes, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, initializer_range=0.08, dtype="bfloat16"
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    _write_tokenizer(folder)


def make_hybrid_model(folder: Path) -> None:
    """Write a small Gemma 3 with a sliding window in two of three layers: several KV cache groups."""
    torch.manual_seed(7)
    config = Gemma3TextConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    _write_tokenizer(folder)


def make_latent_model(folder: Path) -> None:
    """Write a small DeepSeek V2 with latent attention (MLA) and without experts."""
    torch.manual_seed(7)
    layers = 3
    config = DeepseekV2Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        n_group=1,
        topk_group=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.08,
        dtype="bfloat16",
    )
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(FIRST_WORD, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "unk_token": "<unk>"}))
