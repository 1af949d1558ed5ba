"""Which outputs of a call are computed from others, by its autograd graph."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


def before(outputs: Mapping[_Key, Any]) -> dict[_Key, tuple[_Key, ...]]:
    """Name the outputs that an output is computed from, for those that are.

    Args:
        outputs: gradient edges of tensors with a graph, by any key.

    Example:
        >>> import torch
        >>> latent = torch.ones(2, requires_grad=True) * 2
        >>> made = {"latent": latent, "image": latent.exp(), "loss": latent.exp().sum()}
        >>> before({name: torch.autograd.graph.get_gradient_edge(tensor) for name, tensor in made.items()})
        {'image': ('latent',), 'loss': ('latent',)}
    """
    keys = {(edge.node, edge.output_nr): key for key, edge in outputs.items()}
    found: dict[_Key, tuple[_Key, ...]] = {}
    for key, edge in outputs.items() if len(keys) > 1 else ():
        waiting, seen = [edge.node], set()
        met: dict[_Key, None] = {}
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                met.update({keys[each]: None for each in node.next_functions if each in keys})
                waiting += [following for following, _ in node.next_functions if following is not None]
        if met:
            found[key] = tuple(met)
    return found
