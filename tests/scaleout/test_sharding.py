"""Rules of sharding by themselves; `tests/scaleout/predicting/test_ranks.py` holds them to real ranks."""

from __future__ import annotations

import pytest

from memlab.errors import PlanError, ScaleError
from memlab.scaleout.sharding import model_states
from memlab.scaleout.sharding.fsdp2 import Fsdp2Sharding
from memlab.scaleout.sharding.sharding import (
    ROOT,
    DdpSharding,
    MemoryAccount,
    ModelShape,
    ParameterShape,
    Sharding,
    ShardPart,
)
from memlab.scaleout.sharding.zero import Zero3, Zero12, ZeroSizes


def parameter(elements: int, *, trained: bool = True) -> ParameterShape:
    return ParameterShape(elements, rows=elements, itemsize=4, trained=trained, group=0 if trained else None)


# a head of its own and two blocks of a thousand elements
MODEL = ModelShape(
    parameters=(parameter(200), parameter(1000), parameter(1000)),
    modules=((), (0,), (1,), (2,)),
    blocks=(2, 3),
    block_parameters=((1,), (2,)),
    buffer_bytes=0,
)


def a_step(sharding: Sharding, account: MemoryAccount) -> None:
    """Forward through head, first and second block, and back; gradients of 4 bytes an element come as they do."""

    def born(number: int) -> None:
        size_bytes = MODEL.parameters[number].size_bytes
        account.add(ShardPart.GRADIENTS, size_bytes)
        account.gradients[number] = (100 + number, size_bytes)
        sharding.settled(account, number)

    sharding.forward_begins(account, ROOT)
    for module in (1, 2, 3):
        sharding.forward_begins(account, module)
        sharding.forward_ends(account, module)
    sharding.forward_ends(account, ROOT)
    sharding.backward_begins(account, ROOT)
    for module, number in ((3, 2), (2, 1), (1, 0)):
        sharding.backward_begins(account, module)
        born(number)
        sharding.backward_ends(account, module)
    sharding.backward_over(account)
    sharding.update_begins(account)
    sharding.update_over(account)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_step_leaves_what_it_found(engine: str, ranks: int) -> None:
    sharding: Sharding = {
        "ddp": lambda: DdpSharding(MODEL, ranks),
        "fsdp2": lambda: Fsdp2Sharding(MODEL, ranks),
        "zero1": lambda: Zero12(MODEL, ranks, stage=1),
        "zero2": lambda: Zero12(MODEL, ranks, stage=2),
        "zero3": lambda: Zero3(MODEL, ranks, sizes=ZeroSizes(persistence_threshold=500, prefetch=1000)),
    }[engine]()
    account = MemoryAccount(has_host=False)
    sharding.add_base(account)
    standing = dict(account.live)
    for _ in range(2):
        a_step(sharding, account)
        assert account.live == standing
        assert not account.gradients


def test_fsdp2_gathers_one_block_at_a_time_and_the_next_beforehand() -> None:
    account, sharding = MemoryAccount(has_host=False), Fsdp2Sharding(MODEL, 2)
    sharding.add_base(account)
    assert account.live[ShardPart.PARAMETERS] == 2200 * 4 / 2
    sharding.forward_begins(account, ROOT)
    sharding.forward_begins(account, 2)
    assert account.live[ShardPart.GATHERED] == (200 + 1000) * 4
    sharding.forward_ends(account, 2)
    assert account.live[ShardPart.GATHERED] == 200 * 4
    sharding.forward_begins(account, 3)
    sharding.forward_ends(account, 3)
    sharding.forward_ends(account, ROOT)
    assert account.live[ShardPart.BUFFERS] == 0
    sharding.backward_begins(account, ROOT)
    assert account.live[ShardPart.BUFFERS] == 1000 * 4


def test_a_full_bucket_is_reduced_at_once() -> None:
    account, sharding = MemoryAccount(has_host=False), Zero12(MODEL, 2, stage=2, sizes=ZeroSizes(bucket=1200))
    sharding.add_base(account)
    a_step(sharding, account)
    # all gradients are reduced, and the updated parameters gathered
    assert sharding.ring_bytes == (2 + 1) * 2200 * 4
    # parameters, half of them again, the bucket, what is in it again while it is reduced, and the gradient that did not fit;
    # the first rank keeps none of that bucket's
    assert account.peak_bytes == 2200 * 4 + 2200 * 2 + 1200 * 4 + 1000 * 4 + 1000 * 4


def test_frozen_parameters_have_no_gradient_and_no_part_in_the_update() -> None:
    model = ModelShape((parameter(100), parameter(100, trained=False)), ((0, 1),), (), (), buffer_bytes=40)
    account = MemoryAccount(has_host=False)
    Zero12(model, 1, stage=1).add_base(account)
    assert account.live[ShardPart.PARAMETERS] == 840
    assert account.live[ShardPart.OPTIMIZER_STATE] == 400


def test_parameters_in_rows_are_filled_up() -> None:
    uneven = ParameterShape(elements=50, rows=5, itemsize=2, trained=True, group=0)
    assert [uneven.cut_bytes(ranks) for ranks in (1, 2, 4, 8)] == [100, 60, 40, 20]
    assert [uneven.part_bytes(ranks) for ranks in (1, 2, 4, 8)] == [100, 50, 26, 14]


def test_a_ring_of_one_rank_sends_nothing() -> None:
    for ranks, sent_bytes in ((1, 0), (4, 2 * 2200 * 4 * 3 // 4)):
        sharding = DdpSharding(MODEL, ranks)
        a_step(sharding, MemoryAccount(has_host=False))
        assert sharding.sent_bytes == sent_bytes


def test_states_of_a_model_nobody_has_built() -> None:
    # the table of the ZeRO paper: 7.5 billion parameters on 64 GPUs
    per_gpu = {engine: model_states(7_500_000_000, engine, ranks=64).device_bytes / 1e9 for engine in
               ("ddp", "zero1", "zero2", "zero3")}  # fmt: skip
    assert per_gpu == pytest.approx({"ddp": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}, rel=0.02)


def test_states_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="engine 'zero4': allowed are ddp, zero1"):
        model_states(1, "zero4")
    with pytest.raises(PlanError, match="offload 'weights': allowed are optimizer, params, gradients"):
        model_states(1, offload=("weights",))
    with pytest.raises(ScaleError, match="ranks 0: expected a whole number"):
        model_states(1, ranks=0)
