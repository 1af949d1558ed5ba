"""What building takes of the host, in a process of its own; figures for a larger model are in `tests/bench/building.py`."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file
from torch import nn

from tests.helpers.host_peak import can_measure, host_peak

pytestmark = pytest.mark.skipif(not can_measure(), reason="needs /proc/self/clear_refs")

WIDTH, LAYERS = 1536, 14  # 9 MiB each, 126 MiB in fp32
MODEL_BYTES = 4 * LAYERS * WIDTH * WIDTH
PREPARE = f"""
import memlab, safetensors.torch
factory = lambda: torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})))
memlab.build(lambda: torch.nn.Linear(2, 2), dtype="bf16")
"""


@pytest.mark.full
def test_fresh_weights_take_half_and_a_little():
    usual = host_peak("model = factory().to(torch.bfloat16)", PREPARE)
    built = host_peak('model = memlab.build(factory, dtype="bf16")', PREPARE)
    assert usual.peak > 0.95 * MODEL_BYTES  # else the measuring is broken
    assert built.peak > 0.45 * MODEL_BYTES
    # half of the model, 32 MiB in full precision, and the two newest tensors
    assert built.peak < 0.9 * MODEL_BYTES
    assert built.peak < 0.9 * usual.peak


def test_weights_from_a_file_take_half_and_a_little(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).state_dict(), path)
    built = host_peak(f'model = memlab.build(factory, dtype="bf16", weights={str(path)!r})', PREPARE)
    assert 0.45 * MODEL_BYTES < built.own < 0.75 * MODEL_BYTES
    assert built.peak < 0.9 * MODEL_BYTES


def test_the_measuring_sees_a_short_peak():
    found = host_peak("torch.ones(50 * 2**20, dtype=torch.uint8)")
    assert 50 * 2**20 <= found.peak < 80 * 2**20
