"""`Settings` of the allocator: what PYTORCH_ALLOC_CONF says, parsed and checked as torch does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memlab.allocator.sizes import DIVISION_INTERVALS, LARGE_SEGMENT_BYTES, MIN_OWN_SEGMENT_BYTES, UNLIMITED_BYTES
from memlab.errors import PlanError
from memlab.units import MIB

# the variables torch reads, the one that wins first:
# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.h, Note [AcceleratorAllocatorConfig design]
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# keys torch knows that do not change how much device memory a single process takes on its default pool
_WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)
_NO_DIVISIONS = (0,) * DIVISION_INTERVALS
_ITEM = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)")


@dataclass(frozen=True)
class Settings:
    """Settings of the caching allocator; the defaults are torch's.

    Raises:
        PlanError: a value torch would refuse.

    Example:
        >>> settings = Settings.parse("max_split_size_mb:128,expandable_segments:True")
        >>> settings.max_split_size_bytes, settings.expandable_segments
        (134217728, True)
        >>> str(settings)
        'expandable_segments:True,max_split_size_mb:128'
    """

    expandable_segments: bool = False  # grow one range of addresses per stream and pool instead of separate segments
    max_split_size_bytes: int | None = None  # blocks of this size and above are never split; None for no limit
    # how much larger than the request an unsplit block may be; None for the size of a large segment
    max_non_split_rounding_bytes: int | None = None
    large_segment_bytes: int = LARGE_SEGMENT_BYTES  # segment that requests above 1 MiB and below 10 MiB share
    # share of the allowed memory above which idle segments are freed early; 0 for never. Torch heeds it only together
    # with a memory fraction below 1
    garbage_collection_threshold: float = 0.0
    # for each interval from 1 MiB to 64 GiB, the parts a power of two is divided into when sizes are rounded up; 0 or
    # 1 for multiples of 512 bytes
    roundup_power2_divisions: tuple[int, ...] = _NO_DIVISIONS
    per_process_memory_fraction: float = 1.0  # share of the device's memory the allocator may reserve

    def __post_init__(self) -> None:
        for key, name, _ in _SHOWN:
            size = getattr(self, name)
            if key.endswith("_mb") and size is not None and size % MIB:
                raise _refused(key, size / MIB, "a whole number of MiB")
        large = self.large_segment_bytes
        if large <= MIN_OWN_SEGMENT_BYTES:
            raise _refused("large_segment_size_mb", large // MIB, f"more than {MIN_OWN_SEGMENT_BYTES // MIB}")
        limits = {
            "max_split_size_mb": self.max_split_size_bytes,
            "max_non_split_rounding_mb": self.max_non_split_rounding_bytes,
        }
        for key, size in limits.items():
            if size is not None and size < large:
                raise _refused(key, size // MIB, f"{large // MIB} or more, the size of a large segment in MiB")
        threshold, fraction = self.garbage_collection_threshold, self.per_process_memory_fraction
        # NaN is refused with the rest: no comparison holds for it
        if not 0 <= threshold < 1:
            raise _refused("garbage_collection_threshold", threshold, "more than 0 and less than 1")
        if not 0 <= fraction <= 1:
            raise _refused("per_process_memory_fraction", fraction, "a number from 0 to 1")
        divisions = self.roundup_power2_divisions
        if len(divisions) != DIVISION_INTERVALS or not all(n == 0 or _is_power_of_two(n) for n in divisions):
            allowed = f"{DIVISION_INTERVALS} numbers of parts, each 0 or a power of two"
            raise _refused("roundup_power2_divisions", list(divisions), allowed)

    def __str__(self) -> str:
        default = Settings()
        shown = ((key, getattr(self, name), getattr(default, name), show) for key, name, show in _SHOWN)
        return ",".join(f"{key}:{show(value)}" for key, value, usual, show in shown if value != usual)

    @property
    def max_split_bytes(self) -> int:
        """The split limit as a number, as torch compares with it."""
        return UNLIMITED_BYTES if self.max_split_size_bytes is None else self.max_split_size_bytes

    @property
    def unsplit_slack_bytes(self) -> int:
        """Return how much larger than its request an unsplit block may be, as a number."""
        given = self.max_non_split_rounding_bytes
        return self.large_segment_bytes if given is None else given

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Read settings as PYTORCH_ALLOC_CONF holds them.

        Args:
            text: pairs as in ``"max_split_size_mb:128,roundup_power2_divisions:[256:4,>:2]"``; empty for torch's
                defaults. A key given twice counts the second time, as in torch.

        Raises:
            PlanError: text that is no list of pairs, an unknown key (with the nearest known one), a value
                torch would refuse, or the cudaMallocAsync backend, which is another allocator.
        """
        changes: dict[str, Any] = {}
        for key, value in _pairs(text):
            changes |= _parser_of(key)(key, value)
        return replace(cls(), **changes)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """The settings a process started with this environment would use."""
        texts = (environment[name] for name in VARIABLES if name in environment)
        return cls.parse(next(texts, ""))


def _pairs(text: str) -> list[tuple[str, str]]:
    compact = "".join(text.split())
    pairs, position = [], 0
    while position < len(compact):
        item = _ITEM.match(compact, position)
        if item is None:
            raise PlanError(
                f"allocator settings {text!r}: expected key:value pairs with commas between them, "
                f"as in 'max_split_size_mb:128,expandable_segments:True', at {compact[position:]!r}"
            )
        pairs.append((item.group(1), item.group(2)))
        position = item.end()
    return pairs


_Parser = Callable[[str, str], dict[str, Any]]


def _parser_of(key: str) -> _Parser:
    if key not in _PARSERS:
        close = difflib.get_close_matches(key, _PARSERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(_PARSERS))}"
        raise PlanError(f"allocator setting {key!r}: unknown; {hint}")
    return _PARSERS[key]


def _refused(key: str, value: object, allowed: str) -> PlanError:
    return PlanError(f"allocator setting {key}:{value}: expected {allowed}")


def _whole(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise _refused(key, text, "a whole number")
    return int(text)


def _share(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _refused(key, text, "a number between 0 and 1") from None


def _mebibytes(name: str) -> _Parser:
    return lambda key, text: {name: _whole(key, text) * MIB}


def _fraction(key: str, text: str) -> dict[str, Any]:
    return {"per_process_memory_fraction": _share(key, text)}


def _threshold(key: str, text: str) -> dict[str, Any]:
    share = _share(key, text)
    if share == 0:  # the default, but torch takes no zero
        raise _refused(key, text, "more than 0 and less than 1")
    return {"garbage_collection_threshold": share}


def _switch(key: str, text: str) -> dict[str, Any]:
    if text not in ("True", "False"):
        raise _refused(key, text, "True or False")
    return {"expandable_segments": text == "True"}


def _backend(key: str, text: str) -> dict[str, Any]:
    if text != "native":
        raise _refused(key, text, "native; cudaMallocAsync is another allocator, which is not simulated")
    return {}


def _divisions(key: str, text: str) -> dict[str, Any]:
    if text.startswith("["):
        return {"roundup_power2_divisions": _divisions_by_interval(key, text)}
    if not _names_power_of_two(text):
        raise _refused(key, text, "a power of two, or a list as in [256:4,1024:2,>:1]")
    return {"roundup_power2_divisions": (int(text),) * DIVISION_INTERVALS}


def _divisions_by_interval(key: str, text: str) -> tuple[int, ...]:
    """Intervals not named stay undivided, but those below the first one named take its value."""
    divisions = list(_NO_DIVISIONS)
    last, first = 0, True
    for item in text[1:-1].split(","):
        boundary, parts = _boundary_and_parts(key, text, item)
        if boundary is None:
            divisions[last + 1 :] = [parts] * (DIVISION_INTERVALS - last - 1)
            continue
        last = min(boundary, DIVISION_INTERVALS - 1)
        start = 0 if first else last
        divisions[start : last + 1] = [parts] * (last + 1 - start)
        first = False
    return tuple(divisions)


def _boundary_and_parts(key: str, text: str, item: str) -> tuple[int | None, int]:
    """The interval an item begins at, None for all that follow, and its number of parts."""
    boundary, _, parts = item.partition(":")
    if not (boundary == ">" or _names_power_of_two(boundary)) or not (parts == "0" or _names_power_of_two(parts)):
        raise _refused(
            key, text, f"MiB:parts or >:parts, powers of two (or 0 parts), as in [256:4,1024:2,>:1], at {item!r}"
        )
    return None if boundary == ">" else int(boundary).bit_length() - 1, int(parts)


def _names_power_of_two(text: str) -> bool:
    return text.isascii() and text.isdecimal() and _is_power_of_two(int(text))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


_PARSERS: dict[str, _Parser] = {
    "backend": _backend,
    "expandable_segments": _switch,
    "garbage_collection_threshold": _threshold,
    "large_segment_size_mb": _mebibytes("large_segment_bytes"),
    "max_non_split_rounding_mb": _mebibytes("max_non_split_rounding_bytes"),
    "max_split_size_mb": _mebibytes("max_split_size_bytes"),
    "per_process_memory_fraction": _fraction,
    "roundup_power2_divisions": _divisions,
    **dict.fromkeys(_WITHOUT_EFFECT, lambda *_: {}),
}


def _show_mebibytes(size_bytes: int | None) -> str:
    return str((size_bytes or 0) // MIB)


def _show_divisions(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    return f"[{','.join(f'{1 << interval}:{parts}' for interval, parts in enumerate(divisions))}]"


_SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("expandable_segments", "expandable_segments", str),
    ("garbage_collection_threshold", "garbage_collection_threshold", str),
    ("large_segment_size_mb", "large_segment_bytes", _show_mebibytes),
    ("max_non_split_rounding_mb", "max_non_split_rounding_bytes", _show_mebibytes),
    ("max_split_size_mb", "max_split_size_bytes", _show_mebibytes),
    ("per_process_memory_fraction", "per_process_memory_fraction", str),
    ("roundup_power2_divisions", "roundup_power2_divisions", _show_divisions),
)
