"""What has to be left out where nothing is computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from memlab.runtime.fingerprints import Fingerprint
from memlab.techniques.accumulation import merge, probe
from memlab.techniques.accumulation.accumulation import Accumulation
from memlab.techniques.tiling import tiling

IS_EMULATED = bool(os.environ.get("EMULATED_GPU"))
HAS_VALUES = not IS_EMULATED or bool(os.environ.get("EMULATED_GPU_VALUES"))


def unjudged() -> AbstractContextManager[Any]:
    """Split batches without the comparison of rows together and apart, which takes as much as the whole batch.

    Peaks count from there on, as after a comparison.
    """
    return patch.object(Accumulation, "_judged", lambda technique, *_: technique.host.only_tried())


@contextmanager
def without_judgement() -> Iterator[None]:
    """Where there are no values, split batches and layers without comparing rows together and apart, which would differ.

    The steps that follow the judged one are the same.
    """
    if HAS_VALUES:
        yield
        return
    alike = patch.object(tiling, "treats_rows_alike", lambda _part: True)
    # a loss is whatever was copied to its place before; several rules for it that differ would be looked into at every step
    rules = patch.multiple(probe, _closest=lambda rules, *_: rules[:1], _alike=lambda _outputs: False)
    same = patch.object(Fingerprint, "is_like", lambda *_: True)
    with unjudged(), alike, rules, same, patch.object(merge, "distance", lambda *_: 0.0):
        yield
