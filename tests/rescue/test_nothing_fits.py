"""The paragraph for the user when no plan fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memlab.measuring.device import Device
from memlab.plan import Plan
from memlab.records import Prediction
from memlab.rescue.fallback import Place
from memlab.rescue.nothing_fits import Attempt, Room, nothing_fits
from memlab.runtime.out_of_memory import requested_bytes

GIB = 2**30
LEDGER = (
    "memlab CPU device out of memory. Tried to allocate {}. Capacity 4.00 GiB, of which 512.0 MiB is free. 3.50 GiB is held "
    "by 12 live storages."
)
CUDA = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 79.15 GiB of which {free} is free. Including "
    "non-PyTorch memory, this process has 77.90 GiB memory in use. {allowed}Of the allocated memory {held} is allocated by "
    "PyTorch, and {idle} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def attempt(
    plan: str = "", place: Place = Place.FORWARD, error: str = LEDGER.format("1.00 GiB"), step: int = 7
) -> Attempt:
    return Attempt(step, place, Plan.parse(plan), error, requested_bytes(torch.OutOfMemoryError(error)))


def on_cuda(asked: str = "2.00 GiB", free: str = "1.25 GiB", allowed: str = "", held: str = "70.00 GiB", idle: str = "5.00 GiB") -> Attempt:  # fmt: skip
    return attempt(error=CUDA.format(asked=asked, free=free, allowed=allowed, held=held, idle=idle))


def sentence(number: int, *tried: Attempt, **options: Any) -> str:
    return nothing_fits(tried, **options).split(". ")[number]


def test_the_whole_paragraph() -> None:
    tried = [
        attempt(),
        attempt("--accumulate 2"),
        attempt("--accumulate 4", Place.BACKWARD),
        attempt("--accumulate 4 --checkpoint", Place.BACKWARD),
    ]

    assert nothing_fits(tried) == (
        "Step 7 ran out of memory under every plan there is to try: as written, --accumulate 2 (in the forward pass); "
        "--accumulate 4, --accumulate 4 --checkpoint (in the backward pass). The last plan tried asked for 1.00 GiB where 512.0 "
        "MiB of 4.00 GiB was free, so it needs at least 4.50 GiB, 512.0 MiB more than there is: use a GPU with the memory of a "
        "GTX 1080 (8.00 GiB). Otherwise make the batch smaller or its sequences shorter; %memfit find --budget SIZE looks for "
        "a plan that fits. The kernel still works, and weights and optimizer state are as they were before step 7 ran out of memory."
    )


@pytest.mark.parametrize("place", Place)
def test_every_place_has_words(place: Place) -> None:
    words = {
        "forward": "the forward pass",
        "backward": "the backward pass",
        "loop": "the loop's own code",
        "evaluation": "a call without gradients",
        "step": "the optimizer's update",
    }

    assert f"as written (in {words[place]})" in sentence(0, attempt(place=place))


def test_many_plans_are_shortened() -> None:
    tried = [attempt(f"--accumulate {2**n}") for n in range(9)]

    assert sentence(0, *tried) == (
        "Step 7 ran out of memory under every plan there is to try: as written, --accumulate 2, --accumulate 4, 4 more, "
        "--accumulate 128, --accumulate 256 (in the forward pass)"
    )
    assert "as written, --accumulate 2, --accumulate 4, --accumulate 8, --accumulate 16, --accumulate 32 (" in sentence(
        0, *tried[:6]
    )


def test_a_plan_that_was_tried_twice_is_named_once() -> None:
    assert "try: as written (in the loop's own code)" in sentence(
        0, attempt(place=Place.LOOP), attempt(place=Place.LOOP)
    )


def test_attempts_of_another_step_say_so() -> None:
    assert "try: as written (in the forward pass of step 3); --accumulate 2 (in the forward pass)" in sentence(
        0, attempt(step=3), attempt("--accumulate 2")
    )


def test_plans_that_there_was_no_room_to_change_to_are_named() -> None:
    no_room = [Plan.parse("--adam8bit"), Plan.parse("--adam8bit")]

    assert "try: as written (in the forward pass); --adam8bit (no room to change plans)." in nothing_fits(
        [attempt()], no_room
    )


# -- how far off


def test_a_gpu_that_is_too_small() -> None:
    held = on_cuda(asked="12.00 GiB", held="72.00 GiB", idle="1.00 GiB")

    assert sentence(1, held) == (
        "The last plan tried asked for 12.00 GiB where 1.25 GiB of 79.15 GiB was free, so it needs at least 84.00 GiB, 4.85 GiB "
        "more than there is: use a GPU with the memory of a H200 (141.00 GiB)"
    )


def test_what_no_gpu_holds() -> None:
    said = "190.85 GiB more than there is: no single GPU of the catalogue holds that: spread the model over several"
    assert said in sentence(1, on_cuda(asked="200.00 GiB"))


def test_a_share_of_a_gpu() -> None:
    capped = on_cuda(
        allowed="8.00 GiB allowed; ", asked="1.00 GiB", free="70.00 GiB", held="7.25 GiB", idle="256.00 MiB"
    )

    assert Room.of(capped.error) == Room(8 * GIB, GIB // 2, 7 * GIB + GIB // 4, GIB // 4)
    assert sentence(1, capped) == (
        "The last plan tried asked for 1.00 GiB where 512.0 MiB of 8.00 GiB was free, so it needs at least 8.25 GiB, 256.0 MiB "
        "more than there is: use a GPU with the memory of a RTX 2080 Ti (11.00 GiB)"
    )


def test_enough_in_pieces() -> None:
    assert sentence(1, on_cuda(asked="3.00 GiB", held="60.00 GiB", idle="16.00 GiB")) == (
        "The last plan tried asked for 3.00 GiB where 1.25 GiB of 79.15 GiB was free, enough, but not in one piece: start Python "
        "with PYTORCH_ALLOC_CONF=expandable_segments:True"
    )


def test_a_device_that_others_fill() -> None:
    assert sentence(1, on_cuda(asked="2.00 GiB", free="0 bytes", held="10.00 GiB", idle="0 bytes")) == (
        "The last plan tried asked for 2.00 GiB where 0 B of 79.15 GiB was free, and 69.15 GiB was held outside of PyTorch: end "
        "other programs on this device"
    )


def test_others_are_named_and_so_is_a_gpu_that_is_idle() -> None:
    last = on_cuda(asked="2.00 GiB", free="0 bytes", held="10.00 GiB", idle="0 bytes")
    named = last.error.replace("Including", "Process 812 has 60.00 GiB memory in use. Including")
    assert sentence(1, replace(last, error=named)).endswith(
        "69.15 GiB was held outside of PyTorch: end other programs on this device (process 812 holds 60.00 GiB of this GPU)"
    )
    assert sentence(3, last, elsewhere="GPU 1 is idle (23.71 GiB free)") == "GPU 1 is idle (23.71 GiB free)"


def test_errors_without_numbers() -> None:
    nothing = attempt(error="CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert sentence(1, nothing) == "How much was missing is not known, as the error names no size"
    assert sentence(1, nothing, capacity_bytes=GIB) == "How much was missing is not known, as the error names no size"

    only_asked = attempt(error="DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes.")
    assert sentence(1, only_asked, capacity_bytes=GIB) == "The last plan tried asked for 4.00 GiB"


def predicted(gib: float, refused: str = "") -> Prediction:
    size_bytes = round(gib * GIB)
    return Prediction("", "", size_bytes, None, 0, {}, (), 1, 1, 0, (size_bytes, size_bytes), (1, 1), refused=refused)


def test_a_prediction_that_says_more() -> None:
    gpu = "use a GPU with the memory of a GTX 1080 (8.00 GiB)"
    assert sentence(1, attempt(), predictions={Plan(): predicted(6)}) == (
        "The last plan tried asked for 1.00 GiB where 512.0 MiB of 4.00 GiB was free; it is predicted to need 6.00 GiB, 2.00 GiB "
        f"more than there is: {gpu}"
    )
    nothing = attempt(error="CUDA error: out of memory")
    assert sentence(1, nothing, predictions={Plan(): predicted(6)}, capacity_bytes=4 * GIB) == (
        "How much was missing is not known, as the error names no size; it is predicted to need 6.00 GiB, 2.00 GiB more than "
        f"there is: {gpu}"
    )


@pytest.mark.parametrize("prediction", [predicted(3), predicted(4.25), predicted(9, refused="no")])
def test_a_prediction_that_says_less_than_the_error(prediction: Prediction) -> None:
    assert "so it needs at least 4.50 GiB" in sentence(1, attempt(), predictions={Plan(): prediction})


def test_an_error_of_the_ledger_is_read() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised, Device(4 * 2**20).ledger():
        held = torch.empty(3 * 2**20, dtype=torch.uint8)
        torch.empty(2 * 2**20, dtype=torch.uint8)
    del held

    assert Room.of(str(raised.value)) == Room(4 * 2**20, 2**20, 3 * 2**20)


def test_text_of_something_else_is_not_read() -> None:
    assert Room.of("CUDA error: out of memory") is None


# -- what else can be done


def test_a_field_that_closes_the_way() -> None:
    only = {"accumulation", "precision", "optimizer"}
    last = attempt("--accumulate 4 --checkpoint --offload activations,optimizer --chunk-loss")

    assert sentence(2, last, keep=only, rows=4) == (
        "Otherwise allow changes of precision and optimizer (--keep excludes further plans), make the batch smaller or "
        "its sequences shorter; %memfit find --budget SIZE looks for a plan that fits"
    )
    assert "allow changes of accumulation, precision and optimizer" in sentence(2, last, keep=only)


@pytest.mark.parametrize(
    ("keep", "options"),
    [
        ({"accumulation"}, {"rows": 1}),
        ({"accumulation"}, {"keeps_rows": True}),
        ({"optimizer"}, {"has_optimizer": False}),
    ],
)
def test_a_field_that_closes_nothing(keep: set[str], options: dict[str, Any]) -> None:
    assert sentence(2, attempt(), keep=keep, **options).startswith("Otherwise make the batch smaller")


def test_in_the_update_only_fields_of_the_optimizer_matter() -> None:
    last = attempt("--offload optimizer", Place.STEP)

    assert sentence(2, last, keep={"precision", "checkpointing", "optimizer"}, rows=8).startswith(
        "Otherwise allow changes of optimizer (--keep"
    )


def test_an_update_that_is_half_done() -> None:
    assert sentence(3, attempt(place=Place.STEP), is_as_before=False) == (
        "The kernel still works, and the optimizer was in the middle of step 7: load a checkpoint to go on."
    )
