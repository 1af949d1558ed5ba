"""Models of Transformers: from a configuration, and from a folder that `save_pretrained` wrote.

Loading is Transformers' own: it makes the model without memory and reads tensor by tensor into the target format.
What is added here is that nothing is missing or superfluous without being named.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab.building.files import disagreement, listed
from memlab.building.target import BuildTarget
from memlab.errors import BuildError
from memlab.extras import available, require


def is_config(given: object) -> bool:
    """Return whether something is a configuration of Transformers. It is not imported for that: without it, nothing is one."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(given, transformers.PreTrainedConfig)


def is_model_class(given: object) -> bool:
    """Return whether something is a model class of Transformers, or one of its Auto classes."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(given, type) and hasattr(given, "from_pretrained")


def class_for(config: Any) -> Any:
    """The model class that a configuration names."""
    transformers = require("transformers")
    names = getattr(config, "architectures", None) or []
    found = [getattr(transformers, name) for name in names[:1] if hasattr(transformers, name)]
    if found:
        return found[0]
    said = f"names {names[0]}, which Transformers does not have" if names else "does not say which model it is for"
    raise BuildError(
        f"the {type(config).__name__} {said} (architectures={config.architectures!r}); give the class too, "
        "as in memlab.build((transformers.GPT2LMHeadModel, config))"
    )


def from_config(model_class: Any, config: Any) -> nn.Module:
    """A model with fresh weights in the current default format, on a copy of the configuration."""
    # Transformers notes the format on the configuration, and the user's stays as it is
    config, dtype = copy.deepcopy(config), torch.get_default_dtype()
    # Auto classes choose the class in from_config; classes proper have _from_config
    make = getattr(model_class, "_from_config", None) or model_class.from_config
    model: nn.Module = make(config, dtype=dtype)
    return model


def note_dtype(model: Any, dtype: torch.dtype) -> None:
    """Keep the configuration of a model, and those inside it, in agreement with its weights."""
    config = model.config
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if each is not None:
            each.dtype = dtype


def from_folder(model_class: Any, folder: Path, target: BuildTarget, *, strict: bool) -> nn.Module:
    """A model from a folder that `save_pretrained` wrote, each tensor read into its place."""
    transformers = require("transformers")
    if not (folder / "config.json").is_file():
        raise BuildError(
            f"{str(folder)!r} is not a folder with a config.json; of a model on the hub, build the local copy: "
            "huggingface_hub.snapshot_download(name)"
        )
    if model_class is None:
        model_class = class_for(transformers.AutoConfig.from_pretrained(folder, local_files_only=True))
    if target.device.type != "cpu":
        require("accelerate")
    try:
        model, report = model_class.from_pretrained(
            folder,
            dtype=target.dtype or "auto",
            # Transformers asks for accelerate when it is given a device, even the one it takes anyway
            device_map={"": target.device} if available("accelerate") else None,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below, which Transformers does in its log only
        )
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise BuildError(f"the model in {str(folder)!r} cannot be built: {error}") from error
    other = [f"{name} is {tuple(stored)}, not {tuple(own)}" for name, stored, own in sorted(report["mismatched_keys"])]
    if other:
        raise BuildError(f"shapes in {str(folder)!r} are not those of the model: {listed(other)}")
    if strict and (report["missing_keys"] or report["unexpected_keys"]):
        raise BuildError(disagreement(folder, report["missing_keys"], report["unexpected_keys"]))
    built: nn.Module = model
    return built
