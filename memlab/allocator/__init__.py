"""PyTorch's CUDA caching allocator as a simulator: integers in, integers out.

It needs no GPU and no torch. The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.13; `sizes` has
the numbers, `allocator` the order of things, `expandable` the segments that grow.
"""

from __future__ import annotations

from memlab.allocator.allocator import Allocator, Change, Free
from memlab.allocator.blocks import Block, MemorySegment
from memlab.allocator.history import Action, Context
from memlab.allocator.memory_viz import memory_viz
from memlab.allocator.settings import Settings

__all__ = [
    "Action",
    "Allocator",
    "Block",
    "Change",
    "Context",
    "Free",
    "MemorySegment",
    "Settings",
    "memory_viz",
]
