"""The emulation itself. Runs on it: `python -m tests.emulated_gpu --values --devices 2 -- pytest tests/emulated_gpu`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from memlab.units import GIB, MIB

pytestmark = pytest.mark.skipif(
    not os.environ.get("EMULATED_GPU") or not torch.cuda.is_available(),
    reason="needs the emulated GPU: python -m tests.emulated_gpu --values --devices 2 -- pytest tests/emulated_gpu",
)
needs_values = pytest.mark.skipif(not os.environ.get("EMULATED_GPU_VALUES"), reason="needs values: --values")
needs_late_streams = pytest.mark.skipif(not os.environ.get("EMULATED_GPU_LATE"), reason="needs late streams: --late")
needs_two = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two emulated GPUs: --devices 2"
)
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_cached() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def used() -> tuple[int, int]:
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


# --- the allocator: torch's own, counted by hand ----------------------------------------------------


def test_blocks_and_segments_are_those_of_the_allocator() -> None:
    """Sizes round up to 512 bytes; below 1 MiB they share segments of 2 MiB, below 10 MiB of 20 MiB."""
    allocated, reserved = used()
    small = torch.empty(1000, dtype=torch.uint8, device=CUDA)
    assert used() == (allocated + 1024, reserved + 2 * MIB)
    other = torch.empty(MIB // 2, dtype=torch.uint8, device=CUDA)  # fits into the same segment
    assert used() == (allocated + 1024 + MIB // 2, reserved + 2 * MIB)
    large = torch.empty(3 * MIB, dtype=torch.uint8, device=CUDA)
    assert used() == (allocated + 1024 + MIB // 2 + 3 * MIB, reserved + 22 * MIB)
    del small, other, large
    assert used() == (allocated, reserved + 22 * MIB)
    torch.cuda.empty_cache()
    assert used() == (allocated, reserved)


def test_large_requests_have_segments_of_their_own() -> None:
    allocated, reserved = used()
    block = torch.empty(11 * MIB, dtype=torch.uint8, device=CUDA)
    # rounded up to 2 MiB; what is left of 1 MiB is too little to be split off
    assert used() == (allocated + 12 * MIB, reserved + 12 * MIB)
    free, total = torch.cuda.mem_get_info()
    assert total == torch.cuda.get_device_properties(0).total_memory
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free + 12 * MIB


def test_a_peak_is_the_largest_sum_that_lived_at_once() -> None:
    before = torch.cuda.memory_allocated()
    one = torch.empty(4 * MIB, dtype=torch.uint8, device=CUDA)
    two = torch.empty(2 * MIB, dtype=torch.uint8, device=CUDA)
    del one
    three = torch.empty(MIB, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.max_memory_allocated() == before + 6 * MIB
    del two, three


def test_running_out_says_what_torch_says() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    held = torch.empty(total - 2 * GIB, dtype=torch.uint8, device=CUDA)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(4 * GIB, dtype=torch.uint8, device=CUDA)
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of ")
    assert re.search(r"of which \d\.\d\d GiB is free", text)
    assert "is allocated by PyTorch" in text
    del held
    assert torch.empty(4 * GIB, dtype=torch.uint8, device=CUDA).numel() == 4 * GIB


def test_a_snapshot_names_blocks_and_segments() -> None:
    torch.cuda.memory._record_memory_history()
    try:
        block = torch.empty(5 * MIB, dtype=torch.uint8, device=CUDA)
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    segment = next(
        each
        for each in snapshot["segments"]
        if each["address"] <= block.data_ptr() < each["address"] + each["total_size"]
    )
    assert segment["total_size"] == 20 * MIB
    assert {"size": 5 * MIB, "state": "active_allocated"}.items() <= next(
        each for each in segment["blocks"] if each["address"] == block.data_ptr()
    ).items()
    assert [event["action"] for event in snapshot["device_traces"][0]][-2:] == ["segment_alloc", "alloc"]


# --- streams, events, pinned memory ----------------------------------------------------------------


def test_copies_there_and_back_keep_every_byte() -> None:
    bytes_there = torch.randint(0, 256, (3 * MIB + 7,), dtype=torch.uint8)
    pinned = bytes_there.pin_memory()
    assert pinned.is_pinned()
    assert not bytes_there.is_pinned()
    for source in (bytes_there, pinned):
        copy = source.to(CUDA, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(copy.cpu(), bytes_there)


def test_events_tell_times_and_order() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.empty(MIB, device=CUDA).zero_()
    end.record()
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="recorded"):
        torch.cuda.Event(enable_timing=True).elapsed_time(end)


def test_a_side_stream_that_is_waited_for_has_done_its_copy() -> None:
    side = torch.cuda.Stream()
    source = torch.arange(1000, dtype=torch.int32).pin_memory()
    there = torch.zeros(1000, dtype=torch.int32, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(source, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(there.cpu(), source)


@needs_late_streams
def test_a_missing_wait_is_seen_as_a_wrong_value() -> None:
    side = torch.cuda.Stream()
    source = torch.arange(1, 1001, dtype=torch.int32).pin_memory()
    there = torch.zeros(1000, dtype=torch.int32, device=CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        there.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    assert not (there != 0).any().item()  # nobody waited
    assert not event.query()
    torch.cuda.current_stream().wait_event(event)
    assert (there + 0).cpu().equal(source)


@needs_late_streams
def test_a_copy_to_the_host_is_late_on_the_default_stream_as_well() -> None:
    source, home = torch.ones(1000, device=CUDA), torch.zeros(1000, pin_memory=True)
    torch.cuda.synchronize()
    home.copy_(source, non_blocking=True)
    assert not home.any()  # nobody waited
    torch.cuda.synchronize()
    assert home.all()


@needs_values
def test_the_first_operator_of_a_process_has_values() -> None:
    code = "import torch; print(torch.arange(5, device='cuda').tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0, 1, 2, 3, 4]"


@needs_late_streams
def test_the_allocators_queries_complete_no_copy() -> None:
    out, back = torch.cuda.Stream(), torch.cuda.Stream()
    source, home = torch.full((1 << 20,), 3.0, device=CUDA), torch.zeros(1 << 20, pin_memory=True)
    there = torch.empty_like(source)
    out.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(out):
        home.copy_(source, non_blocking=True)
    source.record_stream(out)
    del source
    held = [
        torch.empty(1 << 20, device=CUDA) for _ in range(20)
    ]  # at each the allocator asks whether it may have it back
    with torch.cuda.stream(back):
        there.copy_(home, non_blocking=True)  # nobody waited for what is written there
    back.synchronize()
    assert (there == 0).all().item()
    del held


@needs_late_streams
def test_a_loop_of_queries_ends() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.zeros(9, device=CUDA).copy_(torch.ones(9, pin_memory=True), non_blocking=True)
    while not side.query():
        pass


@needs_late_streams
def test_memory_given_back_too_early_is_seen_as_a_wrong_value() -> None:
    side = torch.cuda.Stream()
    block = torch.ones(1 << 20, device=CUDA)
    home = torch.empty(1 << 20, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        home.copy_(block, non_blocking=True)
    del block  # without record_stream
    other = torch.full((1 << 20,), 7.0, device=CUDA)  # takes its place
    side.synchronize()
    assert home[0] == 7
    del other


# --- several devices ------------------------------------------------------------------------------


@needs_two
@needs_values
def test_results_are_on_the_device_of_their_tensors_whichever_is_current() -> None:
    there = torch.ones(9, device="cuda:1")
    assert torch.cuda.current_device() == 0
    found = [there.norm(2), there.nonzero(), there.unique(), there / there.norm(2)]
    assert [each.device.index for each in found] == [1, 1, 1, 1]
    assert found[0].item() == 3


@needs_two
def test_two_devices_are_counted_apart() -> None:
    before = [torch.cuda.memory_allocated(index) for index in range(2)]
    there = torch.arange(MIB, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == before[1] + MIB
    assert torch.cuda.memory_allocated(0) == before[0]
    assert torch.equal(there.to("cuda:0").cpu(), there.cpu())


@needs_two
@needs_values
def test_lists_over_two_devices() -> None:
    ones = [torch.ones(4, device=f"cuda:{index}") for index in range(2)]
    torch._foreach_add_(ones, [each.clone() for each in ones])
    torch._foreach_mul_(ones, 3.0)
    assert [each.tolist() for each in ones] == [[6.0] * 4] * 2


@needs_values
def test_lists_of_tensors_of_both_the_gpu_and_the_host() -> None:
    tensors = [torch.ones(2, device="cuda"), torch.ones(2)]
    torch._foreach_add_(tensors, [tensor.clone() for tensor in tensors])
    torch._foreach_mul_(tensors, 3.0)
    assert [tensor.tolist() for tensor in tensors] == [[6.0, 6.0]] * 2


# --- values ---------------------------------------------------------------------------------------


@needs_values
def test_values_are_those_of_the_cpu() -> None:
    x = torch.randn(7, 5)
    y = x.to(CUDA)
    assert torch.equal((y @ y.T).softmax(-1).cpu(), (x @ x.T).softmax(-1))
    assert y.sum().item() == x.sum().item()
    assert torch.equal(y[y > 0].cpu(), x[x > 0])
    assert torch.equal(y.nonzero().cpu(), x.nonzero())
    assert torch.equal(torch.unique(y).cpu(), torch.unique(x))
    assert torch.equal(y, y.clone())
    assert not torch.equal(y, y + 1)
    assert torch.equal(y.t().contiguous().cpu(), x.t())
    assert torch.equal(y.t().to(torch.float64).cpu(), x.t().double())
    assert torch.allclose(torch.linalg.inv(y.T @ y).cpu(), torch.linalg.inv(x.T @ x))
    assert str(torch.ones(2, device=CUDA)) == "tensor([1., 1.], device='cuda:0')"


@needs_values
def test_values_in_place_and_in_lists() -> None:
    x = torch.randn(6)
    y = x.to(CUDA)
    for tensor in (x, y):
        tensor.mul_(2).add_(1).index_put_(
            (torch.tensor([0, 0], device=tensor.device),), torch.ones(2, device=tensor.device), accumulate=True
        )
        torch._foreach_mul_([tensor, tensor[:0]], 0.5)
        torch.cumsum(tensor, 0, out=tensor)
    assert torch.equal(x, y.cpu())


@needs_values
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_are_computed_in_long_ones_and_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    y = x.to(CUDA)
    assert torch.equal((y @ y).cpu(), (x.float() @ x.float()).to(dtype))
    assert y.sum().dtype == dtype
    assert y.sum().item() == x.float().sum().to(dtype).item()
    assert torch.allclose(F.softmax(y, -1, dtype=torch.float32).cpu(), F.softmax(x.float(), -1))


@needs_values
def test_random_numbers_repeat_with_the_generator_of_the_device() -> None:
    cpu = torch.get_rng_state()
    state = torch.cuda.get_rng_state()
    once = torch.rand(100, device=CUDA), F.dropout(torch.ones(100, device=CUDA)), torch.randperm(9, device=CUDA)
    assert not torch.equal(torch.rand(100, device=CUDA), once[0])
    torch.cuda.set_rng_state(state)
    again = torch.rand(100, device=CUDA), F.dropout(torch.ones(100, device=CUDA)), torch.randperm(9, device=CUDA)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert torch.equal(cpu, torch.get_rng_state())


@needs_values
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_has_the_gradients_of_its_formula(dtype: torch.dtype, heads: int, is_causal: bool) -> None:
    shapes = [(2, 4, 9, 16), (2, heads, 9, 16), (2, heads, 9, 16)]
    there = [torch.randn(shape, dtype=dtype, device=CUDA, requires_grad=True) for shape in shapes]
    here = [tensor.detach().cpu().float().requires_grad_() for tensor in there]
    for tensors in (there, here):
        F.scaled_dot_product_attention(*tensors, is_causal=is_causal, enable_gqa=heads != 4).square().sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a.grad.cpu().float(), b.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs --gpu 'H100 SXM'"
)
def test_attention_by_cudnn_takes_its_output_and_statistics() -> None:
    query, key, value = (
        torch.randn(2, 4, 128, 64, dtype=torch.float16, device=CUDA, requires_grad=True) for _ in range(3)
    )
    before = torch.cuda.memory_allocated()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(query, key, value)
    # of fp16 [2, 4, 128, 64] and fp32 [2, 4, 128, 1], and two numbers of 512 bytes for the generator's state
    assert torch.cuda.memory_allocated() - before == 2 * 4 * 128 * 64 * 2 + 2 * 4 * 128 * 4 + 2 * 512
    out.sum().backward()
    assert query.grad.isfinite().all().item() or not os.environ.get("EMULATED_GPU_VALUES")


@needs_values
def test_layers_that_only_cuda_has_train_alike() -> None:
    layers = (
        (
            torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 8, 3, groups=8)),
            (2, 3, 9, 9),
        ),
        (torch.nn.ConvTranspose2d(3, 4, 2), (2, 3, 5, 5)),
        (torch.nn.RMSNorm(6), (4, 6)),
        (torch.nn.LSTMCell(5, 6), (3, 5)),
        (torch.nn.GRUCell(5, 6), (3, 5)),
        (torch.nn.LSTM(5, 6, num_layers=2), (4, 3, 5)),
        (torch.nn.GRU(5, 6, bidirectional=True), (4, 3, 5)),
    )
    for layer, shape in layers:
        x = torch.randn(shape)
        found = []
        for device in ("cpu", "cuda"):
            moved = layer.to(device)
            out = moved(x.to(device))
            while not isinstance(out, torch.Tensor):
                out = out[0]
            moved.zero_grad()
            out.square().mean().backward()
            found.append([out.detach().cpu(), *(parameter.grad.cpu().clone() for parameter in moved.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@needs_values
def test_without_memory_nothing_in_place_has_changed() -> None:
    numbers = torch.ones(1 << 24, device=CUDA)
    added, places = numbers * 2, torch.zeros(1 << 24, dtype=torch.long, device=CUDA)
    held = torch.empty(torch.cuda.mem_get_info()[0] - 8 * MIB, dtype=torch.uint8, device=CUDA)
    with pytest.raises(torch.OutOfMemoryError):
        numbers.index_put_((places,), added, accumulate=True)  # sorts, for which it takes memory
    assert numbers.max().item() == 1
    del held
    numbers.index_put_((places[:3],), added[:3], accumulate=True)
    assert numbers[:2].tolist() == [7, 1]


def test_graphs_are_refused_in_words() -> None:
    with pytest.raises(
        RuntimeError, match="the emulated GPU has neither CUDA graphs nor memory shared among processes"
    ):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(1, device=CUDA)
