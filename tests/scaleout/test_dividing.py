"""Rules of division by themselves; `tests/predicting/test_ranks.py` holds them to real ranks."""

from __future__ import annotations

import pytest

from memlab.errors import PlanError, ScaleError
from memlab.scaleout.dividing import model_states
from memlab.scaleout.dividing.book import Book, Part
from memlab.scaleout.dividing.division import Ddp, Division
from memlab.scaleout.dividing.fsdp2 import Fsdp2
from memlab.scaleout.dividing.shape import ROOT, ModelShape, ParameterShape
from memlab.scaleout.dividing.wire import Wire
from memlab.scaleout.dividing.zero import Zero3, Zero12
from memlab.scaleout.zero_sizes import ZeroSizes

KIB = 2**10


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


def a_step(division: Division, book: Book) -> None:
    """Forward through head, first and second block, and back; gradients of 4 bytes an element come as they do."""

    def born(number: int) -> None:
        size_bytes = MODEL.parameters[number].size_bytes
        book.add(Part.GRADIENTS, size_bytes)
        book.gradients[number] = (100 + number, size_bytes)
        division.settled(book, number)

    division.forward_begins(book, ROOT)
    for module in (1, 2, 3):
        division.forward_begins(book, module)
        division.forward_ends(book, module)
    division.forward_ends(book, ROOT)
    division.backward_begins(book, ROOT)
    for module, number in ((3, 2), (2, 1), (1, 0)):
        division.backward_begins(book, module)
        born(number)
        division.backward_ends(book, module)
    division.backward_over(book)
    division.update_begins(book)
    division.update_over(book)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_step_leaves_what_it_found(engine: str, ranks: int) -> None:
    division: Division = {
        "ddp": lambda: Ddp(MODEL, ranks),
        "fsdp2": lambda: Fsdp2(MODEL, ranks),
        "zero1": lambda: Zero12(MODEL, ranks, stage=1),
        "zero2": lambda: Zero12(MODEL, ranks, stage=2),
        "zero3": lambda: Zero3(MODEL, ranks, sizes=ZeroSizes(persistence_threshold=500, prefetch=1000)),
    }[engine]()
    book = Book(has_host=False)
    division.stands(book)
    standing = dict(book.live)
    for _ in range(2):
        a_step(division, book)
        assert book.live == standing
        assert not book.gradients


def test_fsdp2_gathers_one_block_at_a_time_and_the_next_beforehand() -> None:
    book, division = Book(has_host=False), Fsdp2(MODEL, 2)
    division.stands(book)
    assert book.live[Part.PARAMETERS] == 2200 * 4 / 2
    division.forward_begins(book, ROOT)
    division.forward_begins(book, 2)
    assert book.live[Part.GATHERED] == (200 + 1000) * 4
    division.forward_ends(book, 2)
    assert book.live[Part.GATHERED] == 200 * 4
    division.forward_begins(book, 3)
    division.forward_ends(book, 3)
    division.forward_ends(book, ROOT)
    assert book.live[Part.BUFFERS] == 0
    division.backward_begins(book, ROOT)
    assert book.live[Part.BUFFERS] == 1000 * 4


def test_a_full_bucket_is_reduced_at_once() -> None:
    book, division = Book(has_host=False), Zero12(MODEL, 2, stage=2, sizes=ZeroSizes(bucket=1200))
    division.stands(book)
    a_step(division, book)
    # two blocks do not fit into it together, so two are reduced
    assert division.wire.reduced_bytes == 2200 * 4
    # parameters, half of them again, the bucket, what is in it again while it is reduced, and the gradient that did not fit;
    # the first rank keeps none of that bucket's
    assert book.peak_bytes == 2200 * 4 + 2200 * 2 + 1200 * 4 + 1000 * 4 + 1000 * 4


def test_frozen_parameters_have_no_gradient_and_no_part_in_the_update() -> None:
    model = ModelShape((parameter(100), parameter(100, trained=False)), ((0, 1),), (), (), buffer_bytes=40)
    book = Book(has_host=False)
    Zero12(model, 1, stage=1).stands(book)
    assert book.live[Part.PARAMETERS] == 840
    assert book.live[Part.OPTIMIZER_STATE] == 400


def test_parameters_in_rows_are_filled_up() -> None:
    uneven = ParameterShape(elements=50, rows=5, itemsize=2, trained=True, group=0)
    assert [uneven.cut_bytes(ranks) for ranks in (1, 2, 4, 8)] == [100, 60, 40, 20]
    assert [uneven.part_bytes(ranks) for ranks in (1, 2, 4, 8)] == [100, 50, 26, 14]


def test_one_rank_sends_nothing() -> None:
    wire = Wire(1)
    wire.all_reduced(KIB)
    wire.all_gathered(KIB)
    wire.reduce_scattered(KIB)
    assert wire.sent_bytes == 0


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
