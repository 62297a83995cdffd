"""A tiny language model with random values in the format of the Hugging Face ecosystem: for tests without a
hub.
"""

from __future__ import annotations

from pathlib import Path

import torch

# what a run's owner is told when a folder has no digest in the run's file
TINY_DIGEST_LINE = r'needs a digest in task\.settings: digest = "[0-9a-f]{64}"$'


def write_tiny_model(folder: Path) -> Path:
    """Write a Llama of two layers, with a tokenizer of single bytes, into a folder. Return the folder."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    transformers.utils.logging.disable_progress_bar()
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["<end>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=vocabulary["<end>"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
