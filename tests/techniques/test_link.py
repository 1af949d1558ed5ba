"""Where optimizer state is updated: decided by rates, said in words."""

from __future__ import annotations

import pytest
import torch

from memlab.techniques.offload.host_update import is_served
from memlab.techniques.offload.link import Link, host_update_rate


@pytest.mark.parametrize(
    ("link", "on_host"),
    [
        (Link(down=25e9, up=25e9, both=20e9, updated=10e9), True),  # half the bytes, and a fast host
        (Link(down=25e9, up=25e9, both=20e9, updated=1e9), False),  # a slow host
        (Link(down=25e9, up=25e9, both=20e9, updated=2.9e9), False),  # faster, but by too little
        (Link(down=400e9, up=400e9, both=300e9, updated=5e9), False),  # a fast link
    ],
)
def test_the_faster_place_is_taken_if_it_is_faster_by_enough(link: Link, on_host: bool) -> None:
    assert link.favours_host is on_host
    assert ("updated on the host: " in link.verdict) is on_host
    assert ("streamed to the GPU: " in link.verdict) is not on_host
    assert f"link {link.down / 1e9:.0f} GB/s down" in link.verdict


def test_the_host_s_rate_is_measured_without_a_trace() -> None:
    before = torch.get_rng_state()
    assert host_update_rate() > 1e6
    assert torch.equal(before, torch.get_rng_state())


def test_only_adam_in_fp32_is_served() -> None:
    wide, narrow = (torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert is_served(torch.optim.AdamW([wide]))
    assert is_served(torch.optim.Adam([wide], amsgrad=True, fused=True))
    assert not is_served(torch.optim.AdamW([wide, narrow]))
    assert not is_served(torch.optim.NAdam([wide]))

    class Own(torch.optim.AdamW):
        pass

    assert not is_served(Own([wide]))
