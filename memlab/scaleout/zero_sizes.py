"""`ZeroSizes`: how much DeepSpeed holds and sends at once."""

from __future__ import annotations

from dataclasses import dataclass

_BUCKET_MOST, _PERSISTENT_MOST, _LIVE_MOST = 50_000_000, 100_000, 1_000_000_000
# DeepSpeed divides by it
_BUCKET_LEAST = 2
# of the model's elements
_BUCKET_SHARE, _PERSISTENT_SHARE = 8, 100


@dataclass(frozen=True)
class ZeroSizes:
    """Sizes that DeepSpeed is configured with, in elements.

    Its own defaults are made for models of billions: their buckets, of half a billion elements, would be most of a small
    model's memory, and parameters that are used again within a billion would never be let go of.

    Example:
        >>> ZeroSizes.of(7_000_000_000).bucket, ZeroSizes.of(80_000).bucket
        (50000000, 10000)

    Source: https://www.deepspeed.ai/docs/config-json/
    """

    bucket: int = _BUCKET_MOST  # most that are reduced at once, and gathered at once after an update
    persistence_threshold: int = _PERSISTENT_MOST  # smaller parameters stay gathered
    prefetch: int = _BUCKET_MOST  # how many are gathered beforehand
    max_live: int = _LIVE_MOST  # how many may be gathered before prefetching pauses
    max_reuse: int = _BUCKET_MOST  # parameters that are used again within so many stay

    @classmethod
    def of(cls, elements: int) -> ZeroSizes:
        """Sizes for a model."""
        bucket = min(max(elements // _BUCKET_SHARE, _BUCKET_LEAST), _BUCKET_MOST)
        bucket += bucket % 2  # the halves of a bucket are aligned
        return cls(bucket, min(elements // _PERSISTENT_SHARE, _PERSISTENT_MOST), bucket, _LIVE_MOST, bucket)

    def configuration(self, stage: int) -> dict[str, int]:
        """The same, as entries of DeepSpeed's ``zero_optimization``."""
        buckets = {"reduce_bucket_size": self.bucket, "allgather_bucket_size": self.bucket}
        if stage < 3:
            return buckets
        return {
            **buckets,
            "stage3_param_persistence_threshold": self.persistence_threshold,
            "stage3_prefetch_bucket_size": self.prefetch,
            "stage3_max_live_parameters": self.max_live,
            "stage3_max_reuse_distance": self.max_reuse,
        }
