"""The GPU catalogue: complete, plausible, and found by name and by size."""

from __future__ import annotations

import pytest

from memlab.errors import MemlabError
from memlab.hardware.gpus import Gpu, gpu, gpu_for, gpus, smallest_that_holds
from memlab.units import GIB

EVERY = pytest.mark.parametrize("listed", gpus(), ids=lambda listed: listed.name)
NAMES = {
    *("T4", "V100 16GB", "V100 32GB", "P100", "GTX 1080", "RTX 2080 Ti", "RTX 3090", "RTX 4090", "RTX 5090"),
    *("A10G", "L4", "L40S", "A100 40GB", "A100 80GB", "H100 SXM", "H100 PCIe", "H200", "B200"),
    *("MI210", "MI250X", "MI300X", "RX 7900 XTX", "Arc A770", "Arc B580", "Max 1550", "M1", "M2", "M3", "M4"),
}


def test_the_catalogue() -> None:
    assert {listed.name for listed in gpus()} == NAMES
    assert len(gpus()) == len(NAMES)
    assert [listed.memory_bytes for listed in gpus()] == sorted(listed.memory_bytes for listed in gpus())


@EVERY
def test_numbers_are_of_the_right_magnitude(listed: Gpu) -> None:
    least = 0.05 if listed.device_type == "mps" else 0.3
    assert 8 * GIB <= listed.memory_bytes <= 192 * GIB
    assert least * 1e12 <= listed.bandwidth_bytes_per_second <= 8e12
    for rate in (listed.fp32_flops, listed.tf32_flops, listed.fp16_flops, listed.bf16_flops):
        assert rate is None or 25 * least * 1e12 <= rate <= 2.5e15
    assert listed.datasheet.startswith("https://")


@EVERY
def test_rates_fit_the_generation(listed: Gpu) -> None:
    if not listed.is_of_nvidia:
        assert listed.tf32_flops is None  # what torch's setting does is CUDA's
        assert listed.multiprocessors == 0
        return
    ampere_or_later = listed.compute_capability >= (8, 0)
    assert ampere_or_later or listed.tf32_flops is listed.bf16_flops is None
    assert not ampere_or_later or listed.bf16_flops == listed.fp16_flops
    if listed.tf32_flops is not None and listed.fp32_flops is not None and listed.bf16_flops is not None:
        assert listed.fp32_flops <= listed.tf32_flops <= listed.bf16_flops
        # tensor cores do tf32 at half the rate of bf16, which the datasheets round
        assert listed.bf16_flops / listed.tf32_flops == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("name", ["T4", "t4", " a100 40gb ", "rtx 3090"])
def test_a_name_in_any_letter_case(name: str) -> None:
    assert gpu(name).name.casefold() == name.strip().casefold()


KNOWN = (
    "there are GTX 1080, RTX 2080 Ti, Arc B580, Arc A770, M1, P100, T4, V100 16GB, A10G, L4, M2, M3, RTX 3090, RTX 4090, "
    "RX 7900 XTX, M4, RTX 5090, V100 32GB, A100 40GB, L40S, MI210, MI250X, Max 1550, A100 80GB, H100 PCIe, H100 SXM, H200, "
    "B200, MI300X"
)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("T5", f"did you mean T4? T{KNOWN[1:]}"),
        ("L5", f"did you mean L4? T{KNOWN[1:]}"),
        ("L40", f"did you mean L40S? T{KNOWN[1:]}"),
        ("RTX 4099", f"did you mean RTX 4090? T{KNOWN[1:]}"),
        ("H101", f"did you mean H100 PCIe or H100 SXM? T{KNOWN[1:]}"),
        ("A100", "did you mean A100 40GB or A100 80GB?"),
        ("h100", "did you mean H100 PCIe or H100 SXM?"),
        ("V100", "did you mean V100 16GB or V100 32GB?"),
        ("4090", "did you mean RTX 4090?"),
        ("Tesla T4", "did you mean T4?"),
        ("NVIDIA A100-SXM4-80GB", "did you mean A100 40GB or A100 80GB?"),
        ("40GB", f"did you mean A100 40GB? T{KNOWN[1:]}"),
        ("quantum", KNOWN),
        ("", KNOWN),
    ],
)
def test_an_unknown_name(name: str, said: str) -> None:
    with pytest.raises(MemlabError) as caught:
        gpu(name)
    assert str(caught.value) == f"no GPU {name!r} in the catalogue; {said}"


@pytest.mark.parametrize(
    ("size_bytes", "name"),
    [
        (0, "GTX 1080"),
        (8 * GIB, "GTX 1080"),
        (8 * GIB + 1, "RTX 2080 Ti"),
        (16 * GIB, "T4"),
        (24 * GIB, "L4"),
        (80 * GIB, "H100 PCIe"),
        (181 * GIB, None),
    ],
)
def test_the_smallest_that_holds(size_bytes: int, name: str | None) -> None:
    found = smallest_that_holds(size_bytes)
    assert (found.name if found else None) == name


def test_where_no_gpu_is_large_enough_several_are() -> None:
    assert gpu_for(2**40) == (
        "no single GPU of the catalogue holds that: spread the model over several (memlab.how_many(workload) says how many "
        "of which, %%memfit --nproc N --scale fsdp2 trains on them)"
    )
