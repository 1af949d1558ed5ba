"""Linear layers that adapters can go beside.

An adapter is seen only by who calls its layer. So layers are left out whose weight something else reads: tied ones, those that are in
several places, and the parts of torch's own layers (`nn.MultiheadAttention`, `nn.TransformerEncoderLayer`), which hand weights to
their kernels.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import RefusalError
from memlab.plan import Adapters
from memlab.runtime.touch import own_class

FIELD = "adapters"
_MOST_NAMES = 8  # of an error


def linear_layers(model: nn.Module, instead: Mapping[int, nn.Module]) -> dict[str, nn.Module]:
    """Return the linear layers of a model that adapters can go beside, by name.

    Args:
        model: which may have adapters.
        instead: the layer that an adapter is beside, by id of what is in its place.

    Raises:
        RefusalError: they are quantised.
    """
    kinds = _linear_kinds()
    places = Counter(id(child) for module in model.modules() for child in module._modules.values())
    readers = Counter(
        id(p) for _, _, module in _modules(model, instead) for p in module._parameters.values() if p is not None
    )
    found: dict[str, nn.Module] = {}
    for name, parent, module in _modules(model, instead):
        weight = module._parameters.get("weight")
        if weight is None or not isinstance(module, kinds):
            continue
        if not weight.is_floating_point() or own_class(weight) not in (nn.Parameter, FakeTensor):
            raise RefusalError(
                FIELD,
                f"{type(model).__name__} is quantised already ({name} is a {type(module).__name__}), and what adapters learn could not be "
                "merged into it, nor undone to the bit",
                "use peft's own prepare_model_for_kbit_training and get_peft_model before the cell",
            )
        is_read_elsewhere = readers[id(weight)] > 1 or places[id(module)] > 1
        if name and not (is_read_elsewhere or _is_part_of_torchs(parent) or _is_torchs(module)):
            found[name] = module
    return found


def targets_of(
    model: nn.Module, setting: Adapters, trained: Collection[int], instead: Mapping[int, nn.Module]
) -> dict[str, nn.Module]:
    """Return the layers that a setting means, by name.

    Args:
        model: which may have adapters.
        setting: with targets, or none for all but the output layer.
        trained: ids of the parameters that train without adapters.
        instead: the layer that an adapter is beside, by id of what is in its place.

    Raises:
        RefusalError: there are none.
    """
    able, name = linear_layers(model, instead), type(model).__name__
    if not able:
        raise RefusalError(
            FIELD,
            f"{name} calls no linear layers of its own, and adapters go beside these",
            "use --adam8bit or --offload optimizer",
        )
    listed = _listed(able)
    for target in setting.targets:
        if not any(_is_named(each, target) for each in able):
            raise RefusalError(FIELD, f"targets={target} matches no linear layer of {name}", f"there are {listed}")
    output = getattr(model, "get_output_embeddings", lambda: None)()
    chosen = {
        each: layer
        for each, layer in able.items()
        if (any(_is_named(each, target) for target in setting.targets) if setting.targets else layer is not output)
    }
    training = {each: layer for each, layer in chosen.items() if id(layer.weight) in trained}
    if not training:
        raise RefusalError(
            FIELD,
            f"none of the linear layers {_listed(chosen or able)} of {name} is trained by the optimizer, and what is frozen stays as it is",
            "have the optimizer train some, or use peft's own get_peft_model before the cell",
        )
    return training


def written_for_peft(model: nn.Module, names: Collection[str]) -> list[str] | str:
    """Return targets as peft's configuration has them, which mean these layers and no others.

    The last parts of names where they say it, else names in full; a pattern where these are ends of other names.
    """
    everything = [name for name, _ in model.named_modules()]
    last = sorted({name.rpartition(".")[2] for name in names})
    for ends in (last, sorted(names)):
        if {name for name in everything if any(_is_named(name, end) for end in ends)} == set(names):
            return ends
    return "|".join(map(re.escape, sorted(names)))


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _listed(names: Collection[str]) -> str:
    """The last parts of names, the most frequent first."""
    counts = Counter(name.rpartition(".")[2] for name in names)
    shown = [name for name, _ in counts.most_common(_MOST_NAMES)]
    return ", ".join(shown) + (f" and {len(counts) - len(shown)} more" if len(counts) > len(shown) else "")


def _modules(model: nn.Module, instead: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Module | None, nn.Module]]:
    """Yield modules as the model was written, by name and with what they are in."""
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module | None, nn.Module]] = [("", None, model)]
    while waiting:
        name, parent, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = instead.get(id(module), module)
        yield name, parent, own
        children = [
            (f"{name}.{key}" if name else key, own, child) for key, child in own._modules.items() if child is not None
        ]
        waiting += reversed(children)


def _linear_kinds() -> tuple[type[nn.Module], ...]:
    """Kinds of layers that peft has adapters for, and that are a product with a matrix."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    return (nn.Linear, *([transformers.Conv1D] if transformers is not None else []))


def _is_part_of_torchs(parent: nn.Module | None) -> bool:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return parent is not None and type(parent).__module__.startswith("torch.") and not isinstance(parent, containers)


def _is_torchs(module: nn.Module) -> bool:
    """Return whether a layer is one of torch's special ones."""
    return type(module) is not nn.Linear and type(module).__module__.startswith("torch.")
