"""What variables hold."""

from __future__ import annotations

import torch

from memlab.measuring.held import Walk
from memlab.runtime.lazy import LazyTensor


def test_a_tensor_that_waits_to_be_computed_counts_as_what_it_holds_and_is_not_computed() -> None:
    logits = torch.ones(64, 1024, dtype=torch.bfloat16, requires_grad=True) * 2  # [n, v]
    waiting = LazyTensor.cast(logits, torch.float32, torch.Tensor.float)
    walk = Walk(torch.device("cpu"))
    walk.run([("kept", [waiting])])
    assert waiting.computed is None
    assert (walk.held["kept"].size_bytes, walk.held["kept"].graphs) == (64 * 1024 * 2, 1)
