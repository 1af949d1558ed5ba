"""The statistics have torch's names, all of them."""

from __future__ import annotations

import re

import torch

from memlab.allocator import Allocator

# of torch's statistics, those that are about what is not simulated
_NOT_SIMULATED = {"reserved_bytes_by_private_pools", "num_oom_rejections"}


def test_every_name_in_the_documentation_of_memory_stats() -> None:
    simulated = set(Allocator().stats().values)
    documented = re.findall(r'- ``"([^"]+)"``', torch.cuda.memory_stats.__doc__ or "")
    assert len(documented) > 10
    for pattern in (name for name in documented if name.partition(".")[0] not in _NOT_SIMULATED):
        # the documentation says "allocated", the dictionary itself "allocation": torch.cuda.memory_summary reads that
        for name in expanded(pattern.replace("allocated.{", "allocation.{")):
            assert name in simulated, pattern


def expanded(pattern: str) -> list[str]:
    """Every name a pattern such as a.{b,c}.{d,e} stands for."""
    match = re.search(r"\{([^}]*)\}", pattern)
    if match is None:
        return [pattern]
    return [
        name
        for choice in match.group(1).split(",")
        for name in expanded(pattern[: match.start()] + choice + pattern[match.end() :])
    ]


def test_names_are_sorted_as_torch_sorts_them() -> None:
    names = list(Allocator().stats().values)
    assert names == sorted(names)
