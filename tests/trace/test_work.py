"""The work of operators: products by torch's own count, bytes by hand, and no work for views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from memlab import fit
from memlab.hardware.roofline import Kind, Work
from memlab.measuring.runs import training_step
from memlab.plan import Plan, Tier
from memlab.techniques.offload.spill import Spill
from memlab.trace.work import work_of
from tests.helpers.needs import needs
from tests.techniques.models import gpt2, ragged_batch, workload

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Prices whatever runs."""

    def __init__(self) -> None:
        super().__init__()
        self.priced: list[tuple[Any, Work | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.priced.append((func, work_of(func, args, kwargs or {}, out)))
        return out

    def works(self, *kinds: Kind) -> list[Work]:
        return [work for _, work in self.priced if work is not None and (not kinds or work.kind in kinds)]


def works_of(call: Callable[[], Any]) -> list[Work]:
    with Recorder() as recorder:
        call()
    return recorder.works()


def work(call: Callable[[], Any]) -> Work:
    (only,) = works_of(call)
    return only


def flops_by_torch(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda: torch.ones(3, 4) @ torch.ones(4, 5), "fp32"),
        (lambda: torch.addmm(torch.ones(5), torch.ones(3, 4).bfloat16().float(), torch.ones(4, 5)), "fp32"),
        (lambda: torch.ones(2, 3, 4, dtype=torch.bfloat16) @ torch.ones(2, 4, 5, dtype=torch.bfloat16), "bf16"),
        (lambda: torch.baddbmm(torch.ones(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5)), "fp32"),
        (lambda: F.conv2d(torch.ones(2, 3, 8, 8), torch.ones(6, 3, 3, 3), padding=1), "fp32"),
        (lambda: F.conv_transpose1d(torch.ones(2, 3, 8), torch.ones(3, 4, 3)), "fp32"),
        (lambda: torch.ones(3, 4, dtype=torch.float64) @ torch.ones(4, 5, dtype=torch.float64), "fp64"),
    ],
    ids=["mm", "addmm", "bmm", "baddbmm", "conv2d", "conv_transpose1d", "fp64"],
)
def test_flops_of_products_are_those_torch_counts(call: Callable[[], Any], dtype: str) -> None:
    products = [found for found in works_of(call) if found.flops]
    assert [found.flops for found in products] == [flops_by_torch(call)]
    assert [found.dtype for found in products] == [dtype]
    assert products[0].kind in (Kind.PRODUCT, Kind.CONVOLUTION)


def test_flops_of_a_convolution_and_its_gradients() -> None:
    layer = nn.Conv2d(3, 6, 3, padding=1)
    inputs = torch.ones(2, 3, 8, 8, requires_grad=True)

    def step() -> None:
        layer(inputs).sum().backward()

    assert sum(found.flops for found in works_of(step)) == flops_by_torch(step)
    # the answers kept by shape are not mixed up when the gradient of the input is not wanted
    without = layer(inputs.detach()).sum()
    assert sum(found.flops for found in works_of(without.backward)) == 2 * 2 * 6 * 8 * 8 * 3 * 3 * 3


def test_flops_of_attention_with_its_gradients() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    with Recorder() as recorder:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    product = 2 * 2 * 4 * 16 * 16 * 8
    assert [found.flops for found in recorder.works(Kind.ATTENTION, Kind.ATTENTION_BACKWARD)] == [
        2 * product,
        5 * product,
    ]
    assert [found.kind for found in recorder.works(Kind.ATTENTION_BACKWARD)] == [Kind.ATTENTION_BACKWARD]


@pytest.mark.parametrize(
    ("queries", "keys", "of_head"), [(32, 32, 1), (33, 33, 2), (191, 191, 6), (192, 192, 3), (768, 1024, 6)]
)
def test_tiles_of_attention_on_a_cpu(queries: int, keys: int, of_head: int) -> None:
    q, k, v = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (queries, keys, keys))
    with Recorder() as recorder:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert [found.parts for found in recorder.works(Kind.ATTENTION, Kind.ATTENTION_BACKWARD)] == [2 * 3 * of_head] * 2


def test_convolutions_are_of_their_own_kind() -> None:
    layer = nn.Conv2d(3, 4, 3)
    with Recorder() as recorder:
        layer(torch.ones(1, 3, 8, 8)).sum().backward()
    assert len(recorder.works(Kind.CONVOLUTION)) == 2


def test_products_that_torch_does_not_count() -> None:
    sums, a, b = torch.zeros(3, 5), torch.ones(3, 4), torch.ones(4, 5)
    assert work(lambda: sums.addmm_(a, b)) == Work(2 * 3 * 4 * 5, 2 * 60 + 48 + 80, "fp32", kind=Kind.PRODUCT)
    found = [priced.flops for priced in works_of(lambda: torch.mv(torch.ones(3, 4), torch.ones(4))) if priced.flops]
    assert found == [2 * 3 * 4]


# --- bytes ----------------------------------------------------------------------------------------

A, B, ROW = torch.ones(10, 8), torch.ones(10, 8), torch.ones(8)
INDICES = torch.tensor([1, 2])
KIB = torch.ones(256)


@pytest.mark.parametrize(
    ("call", "moved_bytes"),
    [
        (lambda: A + B, 3 * 320),
        (lambda: A * A, 2 * 320),
        (lambda: A.clone().add_(B), 2 * 320 + 3 * 320),
        (lambda: A.clone().zero_(), 2 * 320 + 320),
        (lambda: A.clone().copy_(B), 2 * 320 + 2 * 320),
        (lambda: torch.add(A, B, out=torch.empty(10, 8)), 3 * 320),
        (lambda: A.bfloat16(), 320 + 160),
        (lambda: A + ROW.expand(10, 8), 32 + 2 * 320),
        (lambda: A.t().contiguous(), 2 * 320),
        (lambda: A[:5] + B[:5], 3 * 160),
        (lambda: A[:, :4] + 1, 2 * 160),
        (lambda: torch.cat([A, B]), 4 * 320),
        (lambda: A.sum(), 320 + 4),
        (lambda: torch.zeros(10, 8), 320),
        # two rows of 32 bytes are read and written, and two indices of 8 read
        (lambda: F.embedding(INDICES, A), 2 * 64 + 16),
        (lambda: torch.bernoulli(A), 2 * 320),
    ],
)
def test_bytes_moved(call: Callable[[], Any], moved_bytes: int) -> None:
    assert sum(found.moved_bytes for found in works_of(call)) == moved_bytes


@pytest.mark.parametrize(
    "call",
    [
        lambda: A.t(),
        lambda: A.view(80),
        lambda: A[2:4],
        lambda: A.expand(3, 10, 8),
        lambda: A.detach(),
        lambda: A.split(5),
        lambda: torch.empty(10, 8),
        lambda: torch.empty_like(A),
        lambda: torch.ops.aten._unsafe_view(A, [80]),
    ],
)
def test_views_and_unwritten_memory_are_no_work(call: Callable[[], Any]) -> None:
    assert works_of(call) == []


def test_bytes_of_new_tensors() -> None:
    assert work(lambda: A + B).made_bytes == 320
    assert work(lambda: A @ B.t()).made_bytes == 400
    updated = A.clone()
    assert work(lambda: updated.add_(B)).made_bytes == 0
    assert work(lambda: torch.add(A, B, out=updated)).made_bytes == 0
    assert work(lambda: A.max(dim=1)).made_bytes == 10 * (4 + 8)


def test_tensors_without_elements_are_no_work() -> None:
    assert works_of(lambda: torch.zeros(0)) == []


def test_kinds() -> None:
    with Recorder() as recorder:
        A.tanh(), A.exp(), A.clone().bernoulli_(0.5), A + B, A.clone().add_(B), F.gelu(A), F.gelu(A, approximate="tanh")
    kinds = [found.kind for found in recorder.works()]
    assert kinds == [
        Kind.TANH,
        Kind.EXPONENTIAL,
        Kind.ELEMENTWISE,
        Kind.RANDOM,
        Kind.ELEMENTWISE,
        Kind.ELEMENTWISE,
        Kind.IN_PLACE,
        Kind.EXPONENTIAL,
        Kind.TANH,
    ]
    assert [found.flops for found in recorder.works(Kind.TANH, Kind.EXPONENTIAL, Kind.RANDOM)] == [80.0] * 5


def test_operators_over_lists_take_few_launches() -> None:
    parameters = [torch.ones(100) for _ in range(200)]
    add = work(lambda: torch._foreach_add_(parameters, parameters))
    assert (add.moved_bytes, add.kernels) == (200 * 400 * 3, 4)  # two lists: 64 tensors a launch
    assert add.kind is Kind.IN_PLACE
    one = work(lambda: torch._foreach_mul_([torch.empty(1000)], 2.0))
    assert (one.moved_bytes, one.kernels) == (8000, 1)


def test_fused_adam_reads_and_writes_parameter_and_moments() -> None:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones(1000)
    optimizer.step()
    with Recorder() as recorder:
        optimizer.step()
    (fused,) = [found for func, found in recorder.priced if "fused_adamw" in str(func)]
    # torch's schema says that gradients may be written, too (they are unscaled in place under a scaler)
    assert fused is not None
    assert fused.moved_bytes == pytest.approx(4 * 2 * 4000, abs=16)


def test_a_copy_to_a_file_crosses_to_the_host() -> None:
    spilled = Spill(Tier.DISK).store(KIB)
    copy = work(lambda: spilled.copy_(KIB))
    assert (copy.host_bytes, copy.moved_bytes) == (1024, 1024)
    back = work(lambda: torch.empty(256).copy_(spilled))
    assert (back.host_bytes, back.moved_bytes) == (1024, 1024)


@needs(extra="bitsandbytes")
def test_the_8_bit_optimizer_counts_its_elements() -> None:
    import bitsandbytes

    parameter = nn.Parameter(torch.ones(8192))
    optimizer = bitsandbytes.optim.AdamW8bit([parameter])
    parameter.grad = torch.ones(8192)
    with Recorder() as recorder:
        optimizer.step()
    (update,) = recorder.works(Kind.ADAM_8BIT)
    assert update.flops == 8192
    # parameter, both states and their scales are updated; so is the gradient, says the schema; the codebooks too
    assert update.moved_bytes >= 8192 * (4 + 2 * 4 + 2 * 2)


# --- whole steps ----------------------------------------------------------------------------------

PLANS = ["", "--accumulate 4", "--checkpoint", "--bf16", "--offload optimizer", "--chunk-loss", "--optim adafactor"]


@pytest.mark.parametrize("flags", PLANS)
def test_every_operator_of_a_step_is_priced(flags: str) -> None:
    found = workload(gpt2(), **ragged_batch())
    with fit(found, Plan.parse(flags)):
        training_step(found)
        with Recorder() as recorder:
            training_step(found)
    priced = recorder.works()
    assert all(each.moved_bytes + each.host_bytes > 0 for each in priced)
    assert all(each.flops >= 0 and each.kernels >= 1 for each in priced)
    unpriced = {str(func) for func, each in recorder.priced if each is None}
    assert {name for name in unpriced if not name.startswith("profiler.")} <= {
        f"aten.{name}"
        for name in (
            *("view.default", "t.default", "transpose.int", "detach.default", "expand.default", "slice.Tensor"),
            *("unsqueeze.default", "select.int", "alias.default", "_unsafe_view.default", "permute.default"),
            *("split.Tensor", "squeeze.dim", "view.dtype", "empty.memory_format", "empty_like.default"),
            *("new_empty_strided.default", "as_strided.default", "empty_strided.default", "split_with_sizes.default"),
            *("new_empty.default", "lift_fresh.default", "unbind.int", "squeeze.default", "squeeze.dims"),
            *("diagonal.default", "resize_.default", "zeros.default", "promote_types.default"),
        )
    }


def test_flops_of_a_whole_step_are_those_torch_counts() -> None:
    found = workload(gpt2(), **ragged_batch())
    training_step(found)
    with Recorder() as recorder:
        training_step(found)
    attention = sum(each.flops for each in recorder.works(Kind.ATTENTION, Kind.ATTENTION_BACKWARD))
    counted = sum(each.flops for each in recorder.works(Kind.PRODUCT, Kind.CONVOLUTION))
    is_known = aten._scaled_dot_product_flash_attention_for_cpu in flop_registry  # since torch 2.15
    assert counted + attention * is_known == flops_by_torch(lambda: training_step(found))
    assert attention == 2 * 7 * (2 * 8 * 2 * 32 * 32 * 32)  # two layers


def test_a_fake_step_costs_the_same_as_a_real_one() -> None:
    def works(fake: bool) -> list[Work]:
        layer, inputs = nn.Linear(8, 4), torch.ones(5, 8)
        if not fake:
            with Recorder() as recorder:
                F.gelu(layer(inputs)).sum().backward()
            return recorder.works()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        layer = layer.to("meta")
        with mode:
            weights = {name: torch.empty(p.shape).requires_grad_() for name, p in layer.named_parameters()}
            faked = torch.empty(5, 8)
            with Recorder() as recorder:
                F.gelu(F.linear(faked, weights["weight"], weights["bias"])).sum().backward()
        return recorder.works()

    assert works(fake=True) == works(fake=False)
