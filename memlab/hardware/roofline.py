"""Step time by a roofline: an operator takes as long as the longest of its arithmetic, its memory traffic and its launch.

Rules of the model:

1. An operator's `Work` says what is to be done, `Rates` how fast a device does it, and neither knows the other.
2. Operators follow one another. A GPU hides the shorter parts under the longest: its units work side by side, and the
   host runs ahead. On the CPU the same cores do one after the other, and the parts add up.
3. What crosses to host memory runs beside the rest of its stretch on a GPU, in copy streams of its own: the longer of the two
   counts. On the CPU it adds up like everything else.
4. No rate is fitted to a published step time. What the model misses is common to the plans of a workload for the most
   part, so one measured step calibrates them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from memlab.hardware.gpus import Gpu

_GIGA = 10**9

# torch's own estimator counts on 75 % of the peak (torch/utils/_runtime_estimation.py::flops_to_ns). The best shape of
# a bf16 product reaches 86 % on an A100 SXM and 80 % on an H100 SXM, and a model's shapes are not the best ones:
# https://github.com/stas00/ml-engineering/tree/master/compute/accelerator#maximum-achievable-matmul-flops-comparison-table
_PRODUCT_EFFICIENCY = 0.75
# FlashAttention-2 reaches 50-73 % of an A100's peak: https://arxiv.org/abs/2307.08691
_ATTENTION_EFFICIENCY = 0.6
# an assumption: copies of gigabytes come to some 90 % of the datasheet, operators over a few megabytes to less
_BANDWIDTH_EFFICIENCY = 0.8
# an assumption: dispatch, autograd and launch of an eager operator take 5 to 20 µs of the host's time in forward and
# about half in backward, where no Python runs
_SECONDS_PER_KERNEL = 8e-6
# PCIe x16 by the first compute capability of a generation: 3.0, 4.0, 5.0, each at 80 % for pinned memory (an assumption)
_PCIE_BYTES_PER_SECOND = (((9, 0), 63.0 * _GIGA), ((8, 0), 31.5 * _GIGA), ((0, 0), 15.75 * _GIGA))
_PCIE_EFFICIENCY = 0.8
_OTHER_PCIE_BYTES_PER_SECOND = 31.5 * _GIGA  # of GPUs that are not NVIDIA's: an assumption, 4.0
# fp64 results per clock against fp32 ones, "Throughput of Native Arithmetic Instructions" of the CUDA programming guide:
# https://docs.nvidia.com/cuda/archive/12.9.1/cuda-c-programming-guide/index.html#arithmetic-instructions
_HALF_RATE_FP64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})
_FP64_SHARE = 1 / 2
_SMALLEST_FP64_SHARE = 1 / 64


Cost = tuple[float, float]  # seconds of one unit of `Work.flops`, and of one of `Work.parts`
_COLUMNS = ("flops", "moved_bytes", "kernels", "host_bytes", "made_bytes", "parts", "updating")


class Kind(StrEnum):
    """Kinds of arithmetic in whose speed devices differ."""

    PRODUCT = "product"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention backward"
    ELEMENTWISE = "elementwise"
    IN_PLACE = "in place"
    EXPONENTIAL = "exponential"
    TANH = "tanh"
    RANDOM = "random"
    ADAM_8BIT = "adam8bit"
    QUANTIZATION = "quantization"
    # what surrounds modules that `--checkpoint` runs again, one part each; and where results of products are kept
    RERUN = "rerun"
    SELECTIVE_RERUN = "selective rerun"


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one operator."""

    flops: float = 0.0  # of matrix products; of the other kinds one for each element, or 0 where only memory counts
    moved_bytes: float = 0.0  # read and written on the device
    dtype: str = "other"  # of the arithmetic: "fp32", "fp16", "bf16", "fp64" or "other"
    kernels: int = 1  # how many kernels are launched
    host_bytes: float = 0.0  # cross to host memory or to disk
    kind: str = Kind.ELEMENTWISE  # the sort of arithmetic
    made_bytes: float = 0.0  # of the moved ones, those written to new tensors
    parts: float = 1.0  # how many pieces a CPU's kernel cuts it into, which cost something each
    updating: int = 0  # how many of the kernels are of an update, without modules and autograd around them


@dataclass(frozen=True)
class Rates:
    """Rates of a device. A rate that is not known is NaN, and so is every time that needs it."""

    name: str  # of the device
    flops_per_second: Mapping[str, float]  # of matrix products, by dtype: datasheet peaks, or measured
    bytes_per_second: float  # of device memory
    seconds_per_kernel: float  # the host's time for one operator
    host_bytes_per_second: float  # of the way off the device: PCIe, or a file
    # of the kinds whose arithmetic takes longer than their memory traffic; missing ones do not
    elements_per_second: Mapping[str, float] = field(default_factory=dict)
    # called with dtype and kind, gives the cost of what was measured for itself, None of what these rates tell
    measured: Callable[[str, str], Cost | None] | None = None
    seconds_saved_per_updating: float = 0.0  # of `seconds_per_kernel`, in an update
    product_efficiency: float = 1.0  # share of `flops_per_second` that large products reach; 1 for measured rates
    attention_efficiency: float = 1.0  # the same for fused attention
    bandwidth_efficiency: float = 1.0  # share of `bytes_per_second` that operators reach
    host_efficiency: float = 1.0  # share of `host_bytes_per_second` that copies reach
    # an operator finds this much memory for new tensors; more has to be mapped by the system
    kept_bytes: float = math.inf
    mapped_bytes_per_second: float = math.inf  # how fast that is
    overlaps: bool = True  # whether the shorter parts of an operator are hidden under the longest, or all add up
    # whether what crosses to the host is hidden under a longer stretch, and the other way round
    copies_beside: bool = False
    notes: tuple[str, ...] = ()  # what is missing or assumed, in words

    def cost(self, dtype: str, kind: str) -> Cost | None:
        """The cost of what was measured for itself."""
        return None if self.measured is None else self.measured(dtype, kind)

    def seconds_per_flop(self, dtype: str, kind: str) -> float:
        """Time of one unit of `Work.flops`; 0 where arithmetic never is the longest part."""
        if (cost := self.cost(dtype, kind)) is not None:
            return cost[0]
        if kind in (Kind.PRODUCT, Kind.CONVOLUTION):
            return 1 / (self._product_rate(dtype) * self.product_efficiency)
        if kind in (Kind.ATTENTION, Kind.ATTENTION_BACKWARD):
            return 1 / (self._product_rate(dtype) * self.attention_efficiency)
        return 1 / self.elements_per_second.get(kind, math.inf)

    @property
    def seconds_per_byte(self) -> float:
        return 1 / (self.bytes_per_second * self.bandwidth_efficiency)

    @property
    def seconds_per_host_byte(self) -> float:
        return 1 / (self.host_bytes_per_second * self.host_efficiency)

    def _product_rate(self, dtype: str) -> float:
        # products of integers and the like run on the same units as fp32 at best
        return self.flops_per_second.get(dtype, self.flops_per_second.get("fp32", math.nan))


def rates_of(gpu: Gpu, *, allow_tf32: bool = False) -> Rates:
    """Rates of a GPU of the catalogue.

    Products in a dtype without tensor cores run at the fp32 rate: bf16 on GPUs before Ampere, which torch computes
    in fp32, and fp16 on a GTX 1080. A rate that the catalogue lacks stays unknown and gives NaN.

    Args:
        gpu: from `memlab.hardware.gpus`.
        allow_tf32: whether fp32 products may be rounded to tf32, as `torch.set_float32_matmul_precision("high")` lets
            them; without effect on a GPU that has no tf32.

    Example:
        >>> from memlab.hardware.gpus import gpu
        >>> rates_of(gpu("T4")).notes
        ('bf16 products at the rate of fp32: T4 has no bf16',)
    """
    fp32 = _known(gpu.fp32_flops)
    tf32 = _known(gpu.tf32_flops)
    rates = {
        "fp32": tf32 if allow_tf32 and gpu.tf32_flops is not None else fp32,
        "fp16": fp32 if gpu.fp16_flops is None else gpu.fp16_flops,
        "bf16": fp32 if gpu.bf16_flops is None else gpu.bf16_flops,
        "fp64": fp32 * (_FP64_SHARE if gpu.compute_capability in _HALF_RATE_FP64 else _SMALLEST_FP64_SHARE),
        "other": fp32,
    }
    return Rates(
        name=gpu.name,
        flops_per_second=rates,
        bytes_per_second=gpu.bandwidth_bytes_per_second,
        seconds_per_kernel=_SECONDS_PER_KERNEL,
        host_bytes_per_second=next(rate for since, rate in _PCIE_BYTES_PER_SECOND if gpu.compute_capability >= since)
        if gpu.is_of_nvidia
        else _OTHER_PCIE_BYTES_PER_SECOND,
        product_efficiency=_PRODUCT_EFFICIENCY,
        attention_efficiency=_ATTENTION_EFFICIENCY,
        bandwidth_efficiency=_BANDWIDTH_EFFICIENCY,
        host_efficiency=_PCIE_EFFICIENCY,
        copies_beside=True,
        notes=tuple(_notes(gpu, rates)),
    )


def _known(rate: float | None) -> float:
    return math.nan if rate is None else rate


def _notes(gpu: Gpu, rates: Mapping[str, float]) -> Iterable[str]:
    if math.isnan(gpu.bandwidth_bytes_per_second):
        yield f"no times: {gpu.name} is not in the catalogue of GPUs, so its rates are not known; name one that is like it"
        return
    for dtype, own in (("fp16", gpu.fp16_flops), ("bf16", gpu.bf16_flops)):
        if own is None:
            lacks = (
                f"{gpu.name} has no {dtype}" if gpu.is_of_nvidia else f"the catalogue has no {dtype} rate of {gpu.name}"
            )
            yield f"{dtype} products at the rate of fp32: {lacks}"
    if math.isnan(rates["fp32"]):
        yield f"no time of fp32 products: the catalogue has no fp32 rate of {gpu.name}"


class Bill:
    """The work of many operators, in columns, so that a whole plan space can be priced quickly."""

    __slots__ = ("_members", "classes", "columns")

    def __init__(self, columns: Mapping[str, Sequence[float]], classes: Sequence[tuple[str, str]]) -> None:
        # one number for each operator, by names of `Work`; may be broken numbers in a bill between two others
        self.columns = columns
        self.classes = classes  # dtype and kind of each operator
        self._members: dict[tuple[str, str], list[int]] | None = None

    @classmethod
    def of(cls, works: Iterable[Work]) -> Bill:
        works = list(works)
        columns = {name: [getattr(work, name) for work in works] for name in _COLUMNS}
        return cls(columns, [(work.dtype, work.kind) for work in works])

    def __len__(self) -> int:
        return len(self.classes)

    def towards(self, other: Bill, share: float) -> Bill:
        """The bill this share of the way to another one of the same operators; beyond it for a share above 1.

        Work is affine in the rows of a micro-batch: with bills of 2 and 4 rows, that of 8 is
        `two.towards(four, (8 - 2) / (4 - 2))`.

        Args:
            other: a bill of the same operators in the same order.
            share: 0 gives this bill, 1 the other.

        Raises:
            ValueError: the bills are of different operators.
        """
        if self.classes != other.classes:
            raise ValueError(f"bills of different operators: {len(self)} and {len(other)}")
        pairs = {name: zip(column, other.columns[name], strict=True) for name, column in self.columns.items()}
        between = Bill({name: [a + share * (b - a) for a, b in each] for name, each in pairs.items()}, self.classes)
        between._members = self._grouped()
        return between

    def seconds(self, rates: Rates) -> float:
        """Time of all operators, one after the other."""
        crossing = sum(self.columns["host_bytes"]) * rates.seconds_per_host_byte
        rest = self._seconds_on_device(rates)
        # a rate that is not known makes the whole unknown, which `max` would not
        return max(crossing, rest) if rates.copies_beside and not math.isnan(rest) else crossing + rest

    def _seconds_on_device(self, rates: Rates) -> float:
        seconds, kept = 0.0, rates.kept_bytes
        moved, kernels, flops, parts = (self.columns[name] for name in ("moved_bytes", "kernels", "flops", "parts"))
        if math.isfinite(kept):
            made = sum(made - kept for made in self.columns["made_bytes"] if made > kept)
            seconds += made / rates.mapped_bytes_per_second
        if not rates.overlaps:
            seconds += sum(moved) * rates.seconds_per_byte + sum(kernels) * rates.seconds_per_kernel
            seconds -= sum(self.columns["updating"]) * rates.seconds_saved_per_updating
        for (dtype, kind), members in self._grouped().items():
            per_flop = rates.seconds_per_flop(dtype, kind)
            if not rates.overlaps:
                seconds += sum([flops[member] for member in members]) * per_flop
                if (cost := rates.cost(dtype, kind)) is not None:
                    seconds += sum([parts[member] for member in members]) * cost[1]
            elif math.isnan(per_flop):  # which `max` would pass over or not, depending on the order
                return math.nan
            else:
                # the shorter parts of each operator are hidden
                each = [(moved, rates.seconds_per_byte), (kernels, rates.seconds_per_kernel)]
                each += [(flops, per_flop)] if per_flop else []
                times = [[column[member] * rate for member in members] for column, rate in each]
                seconds += float(sum(map(max, *times)))
        return seconds

    def _grouped(self) -> dict[tuple[str, str], list[int]]:
        if self._members is None:
            members: dict[tuple[str, str], list[int]] = {}
            for at, of in enumerate(self.classes):
                members.setdefault(of, []).append(at)
            self._members = members
        return self._members
