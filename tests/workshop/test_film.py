"""A film of a run holds every birth and death, and is there however the run ends."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch

import memlab
from memlab.workshop import film

MIB = 2**20


def _made() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    layer = torch.nn.Linear(256, 256, bias=False)
    return layer, torch.optim.AdamW(layer.parameters())


def test_peaks_of_steps_are_those_of_a_measurement() -> None:
    layer, optimizer = _made()
    rows = [torch.randn(size, 256) for size in (2, 2000, 2)]
    ends = []
    with film(layer, optimizer) as seen:
        for inputs in rows:
            layer(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(perf_counter())
    first, large, last = seen.peaks(ends)
    weight = 256 * 256 * 4
    outputs = 2000 * 256 * 4
    assert seen.live_bytes[0] == weight
    assert first >= 4 * weight
    assert 4 * weight + outputs <= large
    assert last < 7 * weight < large
    assert seen.live_bytes[-1] == pytest.approx(3 * weight, rel=0.01)


def test_state_that_is_there_is_counted_from_the_beginning() -> None:
    layer, optimizer = _made()
    layer(torch.randn(2, 256)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with film(layer, optimizer) as seen:
        pass
    assert seen.live_bytes[0] >= 3 * 256 * 256 * 4


def test_a_run_that_fails_has_a_film_too() -> None:
    layer, optimizer = _made()
    with pytest.raises(ZeroDivisionError), film(layer, optimizer) as seen:
        kept = torch.ones(MIB)
        raise ZeroDivisionError
    assert max(seen.live_bytes) == 4 * kept.numel() + 256 * 256 * 4
    torch.ones(2 * MIB)
    assert max(seen.live_bytes) < 5 * MIB, "nothing is watched afterwards"


def test_a_session_beside_it_changes_nothing() -> None:
    layer, optimizer = _made()
    with memlab.fit(memlab.Workload(layer, optimizer), "--accumulate 2"), film(layer, optimizer) as seen:
        layer(torch.randn(8, 256)).mean().backward()
        optimizer.step()
    assert layer.weight.grad is not None
    assert len(seen.seconds) == len(seen.live_bytes) > 4


def test_stretches_in_which_nothing_happens_have_no_peak() -> None:
    layer, optimizer = _made()
    with film(layer, optimizer) as seen:
        pass
    assert seen.peaks([seen.began + 1, seen.began + 2]) == [256 * 256 * 4, 0]
