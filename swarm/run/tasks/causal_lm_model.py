"""Build, load and export the models of the task `causal-lm`, with transformers and PEFT."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from swarm.core.errors import UsageError
from swarm.run.tasks.model_files import check_config, read_json

if TYPE_CHECKING:
    from swarm.run.tasks.causal_lm import LanguageModelSettings
    from swarm.run.tasks.model_files import ModelFiles

_CONFIG_BYTES_MAX = 256 << 10
# transformers and torch keep the default device and the random seed per process while a model is made
_BUILDING = threading.Lock()
_SAFE = {"trust_remote_code": False, "local_files_only": True}

# PEFT uses deprecated names of transformers; a volunteer can do nothing about the warning
warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def read_config(files: ModelFiles) -> Any:
    """Return the configuration of a model. Raise UsageError if the model needs custom code."""
    path = files.config()
    check_config(read_json(path, _CONFIG_BYTES_MAX), path)
    try:
        config = AutoConfig.from_pretrained(path.parent, **_SAFE)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"transformers cannot read {path}: {error}") from error
    config.use_cache = False
    return config


def skeleton(config: Any, settings: LanguageModelSettings) -> torch.nn.Module:
    """Return the model without values, to count its parameters."""
    with _BUILDING, torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return _with_method(model, settings)


def build(config: Any, files: ModelFiles, settings: LanguageModelSettings, seed: int) -> torch.nn.Module:
    """Return the model in float32, on the CPU. The same seed gives the same initial values."""
    with _BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if settings.method == "from-scratch":
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                files.folder(), config=config, use_safetensors=True, dtype=torch.float32, **_SAFE
            )
        model = _with_method(model, settings)
    if settings.gradient_checkpointing:
        _enable_checkpointing(model)
    model.train()
    return model


def _enable_checkpointing(model: Any) -> None:
    kinds = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # name of the method in transformers 5.24
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kinds)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kinds)


def _with_method(model: torch.nn.Module, settings: LanguageModelSettings) -> torch.nn.Module:
    if settings.method != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    chosen = settings.lora
    lora = LoraConfig(
        r=chosen.rank,
        lora_alpha=chosen.alpha,
        target_modules=list(chosen.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        adapted: torch.nn.Module = get_peft_model(model, lora)
    except ValueError as error:
        raise UsageError(f"task.settings.lora.targets: {error}") from error
    return adapted


def activation_values(config: Any, *, checkpointing: bool) -> int:
    """Return how many float32 values one token takes in a training step: an estimate for a transformer with a
    gated feed-forward part, whose logits are kept with their softmax and their gradient.
    """
    width, layers = config.hidden_size, config.num_hidden_layers
    block = 16 * width + 6 * (getattr(config, "intermediate_size", None) or 4 * width)
    blocks = 2 * width * layers + block if checkpointing else block * layers
    return int(blocks + 4 * config.vocab_size)


def load_tokenizer(files: ModelFiles) -> Any:
    """Return the tokenizer. Raise UsageError if there is none, or it needs custom code."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(files.folder(), use_fast=True, **_SAFE)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the model has no tokenizer that can be read: {error}") from error
    # avoids a warning about long documents, which are cut into samples afterwards
    tokenizer.model_max_length = 1 << 40
    return tokenizer


def export(model: Any, files: ModelFiles, settings: LanguageModelSettings, folder: Path) -> None:
    """Write a PEFT adapter or a model for `from_pretrained`, with its tokenizer."""
    if settings.method == "lora":
        adapter = model.peft_config["default"]
        adapter.base_model_name_or_path, adapter.revision = settings.model, settings.revision
        model.save_pretrained(folder, save_embedding_layers=False)
    else:
        model.config.use_cache = True
        model.save_pretrained(folder)
    load_tokenizer(files).save_pretrained(folder)
