"""`Settings` of the allocator: what of PYTORCH_ALLOC_CONF decides how much device memory is taken.

Torch has read the text already where there is a GPU, and refuses what it does not allow; so nothing is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from memlab.allocator.sizes import DIVISION_INTERVALS, LARGE_SEGMENT_BYTES, UNLIMITED_BYTES
from memlab.units import MIB

# the variables torch reads, the one that wins first:
# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.h, Note [AcceleratorAllocatorConfig design]
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_ITEM = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)")


@dataclass(frozen=True)
class Settings:
    """Settings of the caching allocator; the defaults are torch's.

    Example:
        >>> settings = Settings.parse("max_split_size_mb:128,expandable_segments:True")
        >>> settings.max_split_bytes // 2**20, settings.expandable_segments
        (128, True)
    """

    text: str = field(default="", compare=False)  # as it was given
    expandable_segments: bool = False  # grow one range of addresses per stream and pool instead of separate segments
    max_split_bytes: int = UNLIMITED_BYTES  # blocks of this size and above are never split
    # how much larger than the request an unsplit block may be; None for the size of a large segment
    max_non_split_rounding_bytes: int | None = None
    large_segment_bytes: int = LARGE_SEGMENT_BYTES  # segment that requests above 1 MiB and below 10 MiB share
    # for each interval from 1 MiB to 64 GiB, the parts a power of two is divided into when sizes are rounded up; 0 or
    # 1 for multiples of 512 bytes
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS

    @property
    def unsplit_slack_bytes(self) -> int:
        """Return how much larger than its request an unsplit block may be, as a number."""
        given = self.max_non_split_rounding_bytes
        return self.large_segment_bytes if given is None else given

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Read settings as PYTORCH_ALLOC_CONF holds them.

        Args:
            text: pairs as in ``"max_split_size_mb:128,roundup_power2_divisions:[256:4,>:2]"``. A key given twice counts
                the second time, as in torch; keys that change nothing here are passed over.

        Raises:
            ValueError: a value that is no number.
        """
        found = dict(_ITEM.findall("".join(text.split())))
        slack = found.get("max_non_split_rounding_mb")
        return cls(
            text,
            expandable_segments=found.get("expandable_segments") == "True",
            max_split_bytes=int(found["max_split_size_mb"]) * MIB if "max_split_size_mb" in found else UNLIMITED_BYTES,
            max_non_split_rounding_bytes=None if slack is None else int(slack) * MIB,
            large_segment_bytes=int(found.get("large_segment_size_mb", LARGE_SEGMENT_BYTES // MIB)) * MIB,
            roundup_power2_divisions=_divisions(found.get("roundup_power2_divisions", "0")),
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """The settings a process started with this environment would use; torch's defaults where they cannot be read."""
        try:
            return cls.parse(next((environment[name] for name in VARIABLES if name in environment), ""))
        except ValueError:
            return cls()


def _divisions(text: str) -> tuple[int, ...]:
    """Intervals not named stay undivided, but those below the first one named take its value."""
    if not text.startswith("["):
        return (int(text),) * DIVISION_INTERVALS
    divisions = [0] * DIVISION_INTERVALS
    last = 0
    for number, item in enumerate(text[1:-1].split(",")):
        boundary, _, parts = item.partition(":")
        if boundary == ">":
            divisions[last + 1 :] = [int(parts)] * (DIVISION_INTERVALS - last - 1)
            continue
        last = min(int(boundary).bit_length() - 1, DIVISION_INTERVALS - 1)
        start = 0 if number == 0 else last
        divisions[start : last + 1] = [int(parts)] * (last + 1 - start)
    return tuple(divisions)
