"""The recorder: births, deaths and work of fake operators, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend

from memlab.errors import TraceError
from memlab.hardware.gpus import gpu
from memlab.measuring.ledger import Ledger
from memlab.measuring.observation import PHASES
from memlab.records import Category, Phase
from memlab.trace.cuda_attention import _RUN, Attention
from memlab.trace.fast_fakes import FastFakes
from memlab.trace.hidden_memory import Held, Temporaries
from memlab.trace.recorder import Recorder, makes_from_nothing

_aten = torch.ops.aten


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.fixture
def recorder(mode: FakeTensorMode) -> Iterator[Recorder]:
    recorder = Recorder(FastFakes(mode))
    recorder.begin([])
    yield recorder
    recorder.close()


def fake(mode: FakeTensorMode, *shape: int, **given: Any) -> torch.Tensor:
    with mode:
        return torch.empty(*shape, **given)


def sizes(recorder: Ledger) -> list[int]:
    return [event[1] for event in recorder.finish().raw]


def test_what_is_made_on_meta_for_its_shape_takes_no_memory(mode: FakeTensorMode, recorder: Recorder) -> None:
    given = fake(mode, 64)
    with recorder:
        made = [torch.empty_like(given, device="meta") for _ in range(3)]  # a recipe is known from the second on
        kept = torch.empty_like(given)
    assert sizes(recorder) == [kept.nbytes], made


# -- against the ledger ------------------------------------------------------------------------


def _network(inputs: torch.Tensor, weight: torch.Tensor) -> None:
    hidden = F.gelu(inputs @ weight)
    loss = F.cross_entropy(F.dropout(hidden, 0.1), torch.arange(len(inputs)) % 4)
    loss.backward()


def _in_place(inputs: torch.Tensor, weight: torch.Tensor) -> None:
    with torch.no_grad():
        copied = inputs.clone()
        copied.add_(1).mul_(copied)
        copied[:, 0] = 0
        halves = torch.cat([copied, copied]).split(len(copied))
        del copied
        halves[0].t().contiguous()


def _views_and_factories(inputs: torch.Tensor, weight: torch.Tensor) -> None:
    zeros = torch.zeros(64, 16)
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    positions = torch.arange(16)
    scale = torch.full((16,), 0.5)
    (inputs * scale).masked_fill(~mask[:8], 0.0).sum().backward()
    del zeros, positions


@pytest.mark.parametrize("compute", [_network, _in_place, _views_and_factories])
def test_events_are_those_of_the_ledger(compute: Callable[..., None], mode: FakeTensorMode) -> None:
    seen = []
    for is_fake in (False, True):
        watching: Ledger = Recorder(FastFakes(mode)) if is_fake else Ledger("cpu")
        with mode if is_fake else torch.enable_grad():
            inputs, weight = torch.empty(8, 16, requires_grad=True), torch.empty(16, 4, requires_grad=True)
        watching.begin([(Category.ACTIVATIONS, inputs), (Category.PARAMETERS, weight)])
        with watching:
            compute(inputs, weight)
        seen.append((sizes(watching), watching.peak_bytes))
        watching.close()
    assert seen[0] == seen[1]
    assert seen[0][0]


def test_numbers_tell_storages_whoever_asks(mode: FakeTensorMode, recorder: Recorder) -> None:
    one = fake(mode, 4, 4)
    recorder.know([(Category.PARAMETERS, one)])
    with recorder:
        product = one @ one
        assert recorder.numbers_of([product, product.t(), one]) == [2, 2, 1]
        assert recorder.numbers_of([torch.ones(3)]) == [3]


def test_the_moment_is_that_of_the_phase(mode: FakeTensorMode, recorder: Recorder) -> None:
    weight = fake(mode, 4, 4, requires_grad=True)
    recorder.begin([(Category.PARAMETERS, weight)])
    with recorder:
        recorder.phase = Phase.FORWARD
        loss = (weight * 2).sum()
        recorder.phase = Phase.OTHER
        loss.backward()
        recorder.phase = Phase.STEP
        stepped = weight.detach() * 3
    phases = [PHASES[moment] for _, size_bytes, _, moment in recorder.finish().raw if size_bytes > 0]
    assert phases[0] is Phase.FORWARD
    assert Phase.BACKWARD in phases
    assert phases[-1] is Phase.STEP
    assert {priced.moment for priced in recorder.priced} != {0}
    del stepped


# -- work --------------------------------------------------------------------------------------


def test_operators_that_do_work_are_priced_in_order(mode: FakeTensorMode, recorder: Recorder) -> None:
    one = fake(mode, 64, 64)
    with recorder:
        for _ in range(2):
            kept = (one @ one).t() + 1
    assert [priced.work for priced in recorder.priced[:2]] == [priced.work for priced in recorder.priced[2:]]
    assert len(recorder.priced) == 4
    assert [priced.event for priced in recorder.priced] == sorted(priced.event for priced in recorder.priced)
    del kept


def test_what_lives_inside_an_operator_counts_at_its_moment(mode: FakeTensorMode) -> None:
    def inside(func: Any, args: Any, kwargs: Any) -> Temporaries | None:
        if func is not _aten.mm.default:
            return None
        return Temporaries(((1000, 24), (500,), Held((100,))), func, args, kwargs, gpu("T4"))

    recorder = Recorder(FastFakes(mode), inside=inside)
    recorder.begin([])
    one = fake(mode, 8, 8)
    with recorder:
        first = one @ one
        second = one @ one
    assert [(hidden.begin, hidden.event) for hidden in recorder.hidden] == [(0, 1), (1, 2)]
    assert list(recorder.hidden[1].peaks()) == [(1, 100), (2, 1124), (2, 600), (2, 100)]
    assert recorder.peak_bytes == 2 * 256 + 1124
    assert recorder.live_bytes == 512
    recorder.close()
    del first, second


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "operator"),
    [
        (lambda one: one.sum().item(), "_local_scalar_dense"),
        (lambda one: bool((one > 0).any()), "_local_scalar_dense"),
        (lambda one: torch.equal(one, one), "equal"),
        (lambda one: torch.allclose(one, one), "allclose"),
        (lambda one: one.nonzero(), "nonzero"),
        (lambda one: one[one > 0], "index"),
        (lambda one: torch.repeat_interleave(one, one[:, 0].long(), 0), "repeat_interleave"),
    ],
    ids=["item", "bool", "equal", "allclose", "nonzero", "boolean index", "repeat"],
)
def test_a_model_that_asks_for_a_value_is_refused(
    ask: Callable[[torch.Tensor], Any], operator: str, mode: FakeTensorMode, recorder: Recorder
) -> None:
    one = fake(mode, 4, 4)
    with pytest.raises(TraceError, match="depends on values") as error:
        with recorder, recorder.model_runs():
            ask(one)
    assert operator in error.value.operator


def test_others_get_the_answer_that_means_nothing_special(mode: FakeTensorMode, recorder: Recorder) -> None:
    one = fake(mode, 4, 4)
    with recorder:
        assert one.sum().item() == 1.0
        assert fake(mode, 1, dtype=torch.int64).item() == 1
        assert bool((one > 0).all()) is True
        assert torch.equal(one, one) is True
        with recorder.model_runs():
            pass
        assert one.sum().item() == 1.0


def test_integers_keep_their_values(recorder: Recorder) -> None:
    labels = torch.tensor([3, 1, 2])
    with recorder, recorder.model_runs():
        assert int(labels.max()) == 3
        assert (labels > 1).nonzero().flatten().tolist() == [0, 2]
        assert torch.arange(4).sum().item() == 6
        assert type(torch.ones(3, dtype=torch.int64)) is torch.Tensor


def test_large_integers_are_fake(recorder: Recorder) -> None:
    with recorder:
        assert type(torch.zeros(2**22, dtype=torch.int64)) is FakeTensor
        assert type(torch.zeros(2**10, dtype=torch.int64)) is torch.Tensor
        assert type(torch.zeros(16, 16)) is FakeTensor


# -- the live model ----------------------------------------------------------------------------


def test_operators_on_live_floats_are_refused(mode: FakeTensorMode) -> None:
    weight, steps = torch.ones(4, 4), torch.tensor(3)
    recorder = Recorder(FastFakes(mode), live=[weight, steps])
    recorder.begin([])
    for touch in (lambda: weight * 2, lambda: weight[0] + 1, lambda: weight.add_(1)):
        with pytest.raises(TraceError, match="reaches a tensor of the live model"):
            with recorder:
                touch()
    with recorder:
        assert int(steps + 1) == 4
    assert torch.equal(weight, torch.ones(4, 4))
    recorder.close()


def test_nothing_is_seen_or_refused_while_it_does_not_watch(mode: FakeTensorMode, recorder: Recorder) -> None:
    one = fake(mode, 4, 4)
    with recorder:
        recorder.stop()
        with mode:
            one @ one
    assert sizes(recorder) == []


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (_aten.empty.memory_format, True),
        (_aten.arange.start, True),
        (_aten.randn.default, True),
        (_aten.empty_like.default, False),
        (_aten.add.Tensor, False),
        (_aten.cat.default, False),
    ],
)
def test_factories_are_known_by_their_schema(func: Any, expected: bool) -> None:
    assert makes_from_nothing(func) is expected


def test_on_a_gpu_autograd_adds_to_a_gradient_that_nobody_else_holds(mode: FakeTensorMode) -> None:
    births = []
    for inside in (None, lambda *_: None):
        recorder = Recorder(FastFakes(mode), inside=inside)
        recorder.begin([])
        inputs = fake(mode, 8, 8).requires_grad_()
        with recorder:
            hidden = inputs.sin()
            twice = hidden.cos() + hidden.cos()  # a sum of the forward pass
            (twice + hidden.exp()).sum().backward()
        del hidden, twice, inputs
        events = sizes(recorder)
        assert sum(events) == recorder.live_bytes == 0
        births.append(events.count(256))
        recorder.close()
    # three gradients of one tensor are added
    assert births[0] - births[1] == 2


def test_a_sum_of_gradients_that_is_added_to_another_one_dies(mode: FakeTensorMode) -> None:
    recorder = Recorder(FastFakes(mode), inside=lambda *_: None)
    recorder.begin([])
    inputs = fake(mode, 8, 8).requires_grad_()
    with recorder:
        for _ in range(3):  # the first makes the leaf's gradient, the others add to it
            (inputs.sin() + inputs.cos()).sum().backward()
    assert recorder.live_bytes == 256
    assert sum(sizes(recorder)) == 256


def on_a_gpu(mode: FakeTensorMode) -> Recorder:
    recorder = Recorder(FastFakes(mode), inside=lambda *_: None)
    recorder.begin([])
    return recorder


def test_a_gradient_that_is_a_view_is_not_added_to(mode: FakeTensorMode) -> None:
    births = []
    for is_view in (False, True):
        recorder, inputs = on_a_gpu(mode), fake(mode, 8, 8).requires_grad_()
        with recorder:
            hidden = inputs.sin()
            first = hidden.cos().sum()
            # the gradient of what was computed last comes first
            last = (hidden.view(64) if is_view else hidden).exp().sum()
            (first + last).backward()
        births.append(sizes(recorder).count(256))
    assert births[1] - births[0] == 1


def test_cuda_makes_the_mask_of_a_dropout_before_its_result(mode: FakeTensorMode) -> None:
    recorder = on_a_gpu(mode)
    given = fake(mode, 8, 8)
    with recorder:
        kept = _aten.native_dropout(given, 0.5, True)
    assert sizes(recorder) == [64, 256]
    del kept


def test_writing_fakes_to_a_real_tensor_of_integers_makes_none(mode: FakeTensorMode) -> None:
    recorder = on_a_gpu(mode)
    with mode:
        given = torch.empty(64, dtype=torch.int32)
    with recorder:
        real = torch.zeros(64, dtype=torch.int16)
        real[:] = given
        real[:32].copy_(given[:32])
    assert sizes(recorder) == [128]


def test_attention_by_its_formula_keeps_what_torchs_function_does(mode: FakeTensorMode) -> None:
    recorder = on_a_gpu(mode)
    query, key, value = (fake(mode, 1, 1, length, 4, dtype=torch.bfloat16) for length in (8, 16, 16))
    with recorder:
        out = _RUN[SDPBackend.MATH](Attention(query, key, value))
    changes = sizes(recorder)
    # in fp32: all three and what two of them are scaled to, scores, their softmax; the scores in bf16 come before the result
    births = [128, 256, 256, 128, 256, 512, 512, 256, 128, 64]
    assert [change for change in changes if change > 0] == births
    assert -128 not in changes[: changes.index(512)]  # the query
    del out


def test_a_copy_off_the_device_costs_its_way_though_one_on_it_came_before(
    mode: FakeTensorMode, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, here, away = (fake(mode, 64) for _ in range(3))
    kept = away.untyped_storage()._cdata
    monkeypatch.setattr("memlab.trace.work.is_spilled", lambda storage: storage._cdata == kept)
    with recorder:
        for target in (here, away, here):
            target.copy_(source)
    assert [each.work.host_bytes for each in recorder.priced] == [0, source.nbytes, 0]
