"""The GPU catalogue: memory, bandwidth and peak rates, each with the datasheet it is from.

Rates are dense ones: where a datasheet gives numbers "with sparsity", they are halved. fp16 and bf16 are matrix
products that accumulate in fp32, as torch does them, on tensor cores where the GPU has them. A rate is None where
the GPU has no such mode, or where its datasheet's number could not be confirmed.

GPUs that are not NVIDIA's are there for their memory, bandwidth and rates; what memlab knows of kernels and workspaces is CUDA's. Of
cards with two dies an entry is one die, since torch shows each as a GPU. Apple's chips come with several sizes of memory, which is the host's
too: the largest is listed, and macOS lets the GPU have about three quarters of it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from memlab.errors import MemlabError
from memlab.units import format_bytes

_TERA = 10**12
_GIGA = 10**9
# memory chips come in powers of two: a GPU's "16 GB" are 16 × 2**30 bytes, before ECC and the driver take their share
_GIB = 2**30
# how alike a name that is not known and one of the catalogue must be, from 0 to 1; of "T5" and "T4" half is the same
_LIKE_ENOUGH = 0.6
_LIKE_ENOUGH_WHEN_SHORT = 0.5
_SHORT = 3
_CONTEXT_BYTES = 512 * 2**20  # of CUDA, with the kernels that are loaded
_USABLE_SHARE = 0.96  # of a GPU's memory


NOT_NVIDIA = (0, 0)  # compute capability of what has none


@dataclass(frozen=True)
class Gpu:
    """A model of GPU."""

    name: str  # as in the catalogue
    memory_bytes: int  # size of its memory; what CUDA reports is up to a few per cent less (ECC, driver)
    bandwidth_bytes_per_second: float  # of its memory
    fp32_flops: float | None  # peak rate of fp32 without tensor cores
    tf32_flops: float | None  # peak rate of fp32 matrix products rounded to tf32
    fp16_flops: float | None  # peak rate of fp16 matrix products
    bf16_flops: float | None  # peak rate of bf16 matrix products
    compute_capability: tuple[int, int]  # (major, minor), as CUDA says it; `NOT_NVIDIA` for others
    datasheet: str  # where the numbers are from
    multiprocessors: int  # how many; 0 where it is not NVIDIA's
    device_type: str = "cuda"  # torch's name for its backend; ROCm's is "cuda" too

    @property
    def is_of_nvidia(self) -> bool:
        """Return whether kernels, workspaces and the allocator are CUDA's."""
        return self.compute_capability != NOT_NVIDIA

    @property
    def threads(self) -> int:
        """Most threads that one multiprocessor runs at once (CUDA programming guide, Technical Specifications)."""
        major, minor = self.compute_capability
        if (major, minor) == (7, 5):
            return 1024
        return 1536 if major == 12 or (major == 8 and minor) else 2048


_P100 = "https://images.nvidia.com/content/tesla/pdf/nvidia-tesla-p100-PCIe-datasheet.pdf"
_GTX_1080 = (
    "https://international.download.nvidia.com/geforce-com/international/pdfs/GeForce_GTX_1080_Whitepaper_FINAL.pdf"
)
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_TURING = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
_T4 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_A10G = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_L4 = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
_L40S = "https://www.nvidia.com/en-us/data-center/l40s/"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"
_RTX_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_B200 = "https://www.nvidia.com/en-us/data-center/dgx-b200/"


def _gpu(
    name: str,
    gib: int,
    gigabytes_per_second: float,
    teraflops: tuple[float | None, float | None, float | None, float | None],
    compute_capability: tuple[int, int],
    datasheet: str,
    multiprocessors: int,
) -> Gpu:
    fp32, tf32, fp16, bf16 = (None if rate is None else rate * _TERA for rate in teraflops)
    bandwidth = gigabytes_per_second * _GIGA
    return Gpu(name, gib * _GIB, bandwidth, fp32, tf32, fp16, bf16, compute_capability, datasheet, multiprocessors)


_MI210 = (
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi210-data-sheet.pdf"
)
_MI250X = "https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html"
_MI300X = (
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf"
)
_RX_7900_XTX = "https://www.amd.com/en/products/graphics/desktops/radeon/7000-series/amd-radeon-rx-7900xtx.html"
_ARC_A770 = (
    "https://www.intel.com/content/www/us/en/products/sku/229151/intel-arc-a770-graphics-16gb/specifications.html"
)
_ARC_B580 = "https://www.intel.com/content/www/us/en/products/sku/241598/intel-arc-b580-graphics/specifications.html"
_MAX_1550 = (
    "https://www.intel.com/content/www/us/en/products/sku/232873/intel-data-center-gpu-max-1550/specifications.html"
)
_M1 = "https://www.apple.com/newsroom/2020/11/apple-unleashes-m1/"
_M2 = "https://www.apple.com/newsroom/2022/06/apple-unveils-m2-with-breakthrough-performance-and-capabilities/"
_M3 = "https://www.apple.com/newsroom/2023/10/apple-unveils-m3-m3-pro-and-m3-max-the-most-advanced-chips-for-a-personal-computer/"
_M4 = "https://www.apple.com/newsroom/2024/05/apple-introduces-m4-chip/"


def _other(
    name: str,
    gib: int,
    gigabytes_per_second: float,
    teraflops: tuple[float | None, float | None, float | None, float | None],
    device_type: str,
    datasheet: str,
) -> Gpu:
    return replace(_gpu(name, gib, gigabytes_per_second, teraflops, NOT_NVIDIA, datasheet, 0), device_type=device_type)


# name, memory in GiB, bandwidth in GB/s, teraflops in (fp32, tf32, fp16, bf16), compute capability, datasheet, multiprocessors
_GPUS: tuple[Gpu, ...] = (
    _gpu("GTX 1080", 8, 320, (8.873, None, None, None), (6, 1), _GTX_1080, 20),
    _gpu("P100", 16, 732, (9.3, None, 18.7, None), (6, 0), _P100, 56),  # PCIe; fp16 without tensor cores
    _gpu("V100 16GB", 16, 900, (15.7, None, 125, None), (7, 0), _V100, 80),  # SXM2
    _gpu("V100 32GB", 32, 900, (15.7, None, 125, None), (7, 0), _V100, 80),  # SXM2
    _gpu("T4", 16, 300, (8.1, None, 65, None), (7, 5), _T4, 40),
    _gpu("RTX 2080 Ti", 11, 616, (13.4, None, 53.8, None), (7, 5), _TURING, 68),  # reference clocks
    _gpu("A100 40GB", 40, 1555, (19.5, 156, 312, 312), (8, 0), _A100, 108),
    _gpu("A100 80GB", 80, 2039, (19.5, 156, 312, 312), (8, 0), _A100, 108),  # SXM; PCIe has 1935 GB/s
    _gpu("RTX 3090", 24, 936, (35.6, 35.6, 71, 71), (8, 6), _GA102, 82),
    _gpu("A10G", 24, 600, (None, None, 70, 70), (8, 6), _A10G, 80),
    _gpu("RTX 4090", 24, 1008, (82.6, 82.6, 165.2, 165.2), (8, 9), _ADA, 128),
    _gpu("L4", 24, 300, (30.3, 60, 121, 121), (8, 9), _L4, 58),
    _gpu("L40S", 48, 864, (91.6, 183, 362.05, 362.05), (8, 9), _L40S, 142),
    _gpu("H100 PCIe", 80, 2000, (51, 756 / 2, 1513 / 2, 1513 / 2), (9, 0), _H100, 114),
    _gpu("H100 SXM", 80, 3350, (67, 989 / 2, 1979 / 2, 1979 / 2), (9, 0), _H100, 132),
    _gpu("H200", 141, 4800, (67, 989 / 2, 1979 / 2, 1979 / 2), (9, 0), _H200, 132),
    _gpu("RTX 5090", 32, 1792, (104.8, 104.8, 209.5, 209.5), (12, 0), _RTX_BLACKWELL, 170),
    # an eighth of the DGX B200: 1,440 GB, 64 TB/s; sources disagree about fp32 (75 or 80) and tf32 (1.1 or 1.125 PFLOP/s)
    _gpu("B200", 180, 8000, (None, None, 2250, 2250), (10, 0), _B200, 148),
    _other("MI210", 64, 1638, (22.6, None, 181, 181), "cuda", _MI210),
    _other("MI250X", 64, 3277 / 2, (47.9 / 2, None, 383 / 2, 383 / 2), "cuda", _MI250X),  # one of two dies
    _other("MI300X", 192, 5300, (163.4, None, 1307.4, 1307.4), "cuda", _MI300X),
    _other("RX 7900 XTX", 24, 960, (61.4, None, 122.8, None), "cuda", _RX_7900_XTX),
    _other("Arc A770", 16, 560, (None, None, None, None), "xpu", _ARC_A770),
    _other("Arc B580", 12, 456, (13.67, None, None, None), "xpu", _ARC_B580),
    _other("Max 1550", 64, 3277 / 2, (52 / 2, None, None, None), "xpu", _MAX_1550),  # one of two stacks
    _other("M1", 16, 68, (2.6, None, None, None), "mps", _M1),
    _other("M2", 24, 100, (3.6, None, None, None), "mps", _M2),
    _other("M3", 24, 100, (None, None, None, None), "mps", _M3),
    _other("M4", 32, 120, (None, None, None, None), "mps", _M4),
)
_BY_NAME = {gpu.name.casefold(): gpu for gpu in _GPUS}


def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalogue, by memory and then by name.

    Example:
        >>> [gpu.name for gpu in gpus()][:3]
        ['GTX 1080', 'RTX 2080 Ti', 'Arc B580']
    """
    return tuple(sorted(_GPUS, key=lambda gpu: (gpu.memory_bytes, gpu.name)))


def gpu(name: str) -> Gpu:
    """Look a GPU up.

    Raises:
        MemlabError: no such GPU, with the nearest ones: those of that model ("A100"), or of a name like it.

    Example:
        >>> gpu("t4").memory_bytes // 2**30
        16
    """
    found = _BY_NAME.get(name.strip().casefold())
    if found is None:
        raise MemlabError(f"no GPU {name!r} in the catalogue; {_nearest(name.casefold())}")
    return found


def smallest_that_holds(size_bytes: int) -> Gpu | None:
    """The GPU of NVIDIA's with the least memory that is at least this large; None when there is none.

    Of GPUs with the same memory, the one with the lower bandwidth: the cheaper one, as a rule.

    Example:
        >>> smallest_that_holds(20 * 2**30).name
        'L4'
    """
    large_enough = (listed for listed in _GPUS if listed.is_of_nvidia and listed.memory_bytes >= size_bytes)
    return min(large_enough, key=lambda listed: (listed.memory_bytes, listed.bandwidth_bytes_per_second), default=None)


def usable_bytes(listed: Gpu) -> int:
    """Return what the caching allocator may have of a GPU: CUDA's context and what the driver keeps are left out.

    Example:
        >>> round(usable_bytes(gpu("T4")) / 2**30, 1)
        14.9
    """
    return round(listed.memory_bytes * _USABLE_SHARE) - _CONTEXT_BYTES


def gpu_for(needed_bytes: int) -> str:
    """Return which GPU would do, in words; CUDA's context and what the driver keeps are allowed for.

    Example:
        >>> gpu_for(20 * 2**30)
        'use a GPU with the memory of a L4 (24.00 GiB)'
        >>> gpu_for(3 * 2**20)
        'any GPU has that much; where a capacity was set, raise it'
    """
    if needed_bytes < _GIB:
        return "any GPU has that much; where a capacity was set, raise it"
    gpu = smallest_that_holds(round((needed_bytes + _CONTEXT_BYTES) / _USABLE_SHARE))
    if gpu is None:
        return (
            "no single GPU of the catalogue holds that: spread the model over several (memlab.how_many(workload) says how "
            "many of which, %%memfit --nproc N --scale fsdp2 trains on them)"
        )
    return f"use a GPU with the memory of a {gpu.name} ({format_bytes(gpu.memory_bytes)})"


def _nearest(name: str) -> str:
    """GPUs of a model that is named ("A100"), or of a name like it, with all there are; all where none is like it."""
    models = _by_model()
    named = [word for word in re.split(r"[^a-z0-9]+", name) if word in models]
    if named:
        return f"did you mean {_either(models[named[0]])}?"
    known = f"there are {', '.join(listed.name for listed in gpus())}"
    names = {key: [listed] for key, listed in _BY_NAME.items()} | models
    cutoff = _LIKE_ENOUGH_WHEN_SHORT if len(name.strip()) <= _SHORT else _LIKE_ENOUGH
    close = difflib.get_close_matches(name.strip(), names, n=1, cutoff=cutoff)
    return f"did you mean {_either(names[close[0]])}? {known[0].upper()}{known[1:]}" if close else known


def _by_model() -> dict[str, list[Gpu]]:
    """GPUs by the word of their name that tells the model, as in "a100" and "4090"."""
    models: dict[str, list[Gpu]] = {}
    for listed in _GPUS:
        for word in listed.name.casefold().split():
            if any(letter.isdigit() for letter in word) and not word.endswith("gb"):
                models.setdefault(word, []).append(listed)
    return models


def _either(listed: list[Gpu]) -> str:
    return " or ".join(each.name for each in listed)
