"""Fakes made by recipe are the ones that the official fake mode makes: the same events, the same work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memlab.plan import Plan
from memlab.predicting import predict_all
from memlab.predicting.targets import target_for
from memlab.trace.fast_fakes import FastFakes, Recipe, _key, recipes_for
from memlab.trace.tracer import Trace, Tracer
from tests.predicting.families import FAMILIES, family

_aten = torch.ops.aten


class Official(FastFakes):
    """Every operator by the official way, every time."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Recipe | None]:
        return self._official(func, args, kwargs), None


def tracers(name: str, device: str | None = None) -> tuple[Tracer, Tracer]:
    """A tracer as it is, and one that always goes the official way."""
    workload = family(name)
    target = target_for(workload, device)
    fast, official = (Tracer(workload, target.device, target.choices) for _ in range(2))
    official._fakes = Official(official.twin.fake_mode)
    return fast, official


def events(trace: Trace) -> list[tuple[int, int, int]]:
    """Births and deaths; those that die together (autocast's cache, in the order of addresses) by number."""
    found: list[tuple[int, int, int]] = []
    deaths: list[tuple[int, int, int]] = []
    for _, *event in trace.observation.raw:
        if event[0] < 0:
            deaths.append((event[0], event[1], event[2]))
            continue
        found += sorted(deaths, key=lambda death: death[1])
        found.append((event[0], event[1], event[2]))
        deaths.clear()
    return [*found, *sorted(deaths, key=lambda death: death[1])]


def assert_alike(one: Trace, other: Trace) -> None:
    assert events(one) == events(other)
    assert one.observation.baseline == other.observation.baseline
    assert one.observation.categories == other.observation.categories
    assert one.observation.peak_bytes == other.observation.peak_bytes
    assert one.priced == other.priced
    assert one.hidden == other.hidden
    assert one.outputs == other.outputs
    assert one.trained == other.trained


@pytest.mark.few(4)
# the official way gives one and the same tensor for both gradients of an LSTM's biases, the real operator two
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "lstm"])
def test_a_pass_is_the_same_either_way(name: str) -> None:
    fast, official = tracers(name)
    # the second pass is made of recipes only
    first, second = fast._pass_of_all(Plan()), fast._pass_of_all(Plan())
    expected = official.one_pass(Plan())
    assert_alike(first, expected)
    assert_alike(second, expected)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("gpt2 with dropout", "--checkpoint"),
        ("gpt2", "--checkpoint selective --bf16"),
        ("gpt2", "--chunk-loss"),
        ("llama", "--precision pure-bf16"),
        ("t5", "--offload activations"),
        ("bert classifier", "--bf16"),
        ("vit", "--checkpoint --bf16"),
        ("convolutions", "--bf16"),
    ],
)
def test_a_pass_under_a_plan_is_the_same_either_way(name: str, flags: str) -> None:
    fast, official = tracers(name)
    plan = Plan.parse(flags)
    fast.one_pass(Plan())
    fast.one_pass(plan)
    assert_alike(fast._pass_of_all(plan), official.one_pass(plan))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "flags",
    ["", "--adam8bit", "--optim adafactor", "--optim adamw4bit", "--offload optimizer", "--precision pure-bf16"],
)
def test_an_update_is_the_same_either_way(flags: str) -> None:
    fast, official = tracers("gpt2")
    plan, trained = Plan.parse(flags), range(28)
    fast.updates(plan, trained)
    for one, other in zip(fast.updates(plan, trained), official.updates(plan, trained), strict=True):
        assert_alike(one, other)


def test_recipes_learnt_at_one_size_do_not_serve_another() -> None:
    fast, official = tracers("gpt2")
    for rows in (8, 4, 1, 4):
        assert_alike(fast.one_pass(Plan(), rows), official.one_pass(Plan(), rows))


def test_recipes_serve_later_traces_of_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes_for.cache_clear()
    tracers("gpt2")[0].one_pass(Plan())
    asked: list[Any] = []
    official = FastFakes._official
    monkeypatch.setattr(
        FastFakes, "_official", lambda fakes, func, *given: asked.append(func) or official(fakes, func, *given)
    )
    tracers("gpt2")[0].one_pass(Plan())
    assert _aten.addmm.default not in asked
    tracers("gpt2", "A100 80GB")[0].one_pass(Plan())
    assert _aten.addmm.default in asked


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_a_pass_for_a_gpu_is_the_same_either_way(name: str) -> None:
    fast, official = tracers(name, "A100 80GB")
    fast.one_pass(Plan())
    assert_alike(fast._pass_of_all(Plan()), official.one_pass(Plan()))


# -- recipes -----------------------------------------------------------------------------------


@pytest.fixture
def fakes() -> FastFakes:
    return FastFakes(FakeTensorMode(allow_non_fake_inputs=True))


def fake(fakes: FastFakes, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with fakes.mode:
        return torch.empty(shape, dtype=dtype)


def run(fakes: FastFakes, func: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """The result of a first, and of a second run."""
    with fakes.mode:
        return [fakes.run(func, args, kwargs)[0] for _ in range(2)]


def test_results_have_the_shape_stride_and_dtype_of_the_first(fakes: FastFakes) -> None:
    one = fake(fakes, 3, 4).t()
    for func, args in (
        (_aten.mul.Tensor, (one, 2.0)),
        (_aten.gt.Scalar, (one, 0.0)),
        (_aten.mm.default, (one, fake(fakes, 3, 5))),
        (_aten.native_layer_norm.default, (fake(fakes, 3, 4), [4], None, None, 1e-5)),
        (_aten._to_copy.default, (one,)),
    ):
        first, second = run(fakes, func, *args)
        for a, b in zip(_listed(first), _listed(second), strict=True):
            assert type(b) is FakeTensor
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
            assert a.untyped_storage()._cdata != b.untyped_storage()._cdata


def _listed(result: Any) -> list[Any]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def test_in_place_operators_return_their_argument(fakes: FastFakes) -> None:
    one = fake(fakes, 3, 4)
    assert all(result is one for result in run(fakes, _aten.add_.Tensor, one, 1.0))


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (_aten.view.default, ([4, 3],)),
        (_aten.t.default, ()),
        (_aten.slice.Tensor, (0, 1, 2)),
        (_aten.split.Tensor, (1,)),
        (_aten.detach.default, ()),
        (_aten.expand.default, ([2, 3, 4],)),
    ],
    ids=lambda value: str(value) if hasattr(value, "_schema") else "",
)
def test_views_share_the_storage_of_their_base(fakes: FastFakes, func: Any, args: tuple[Any, ...]) -> None:
    one = fake(fakes, 3, 4)
    first, second = run(fakes, func, one, *args)
    for a, b in zip(_listed(first), _listed(second), strict=True):
        assert b.untyped_storage()._cdata == one.untyped_storage()._cdata
        assert (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())


def test_a_view_of_another_place_is_another_view(fakes: FastFakes) -> None:
    one = fake(fakes, 6, 4)
    halves = [run(fakes, _aten.slice.Tensor, one, 0, start, start + 3)[1] for start in (0, 3)]
    assert [half.storage_offset() for half in halves] == [0, 12]
    # the same operator on a view that begins elsewhere
    nested = [run(fakes, _aten.slice.Tensor, half, 0, 1, 2)[1] for half in halves]
    assert [part.storage_offset() for part in nested] == [4, 16]


def test_a_result_may_be_written_to_and_grow_a_graph(fakes: FastFakes) -> None:
    with fakes.mode:
        weight = torch.empty(4, 4, requires_grad=True)
    made = run(fakes, _aten.mm.default, fake(fakes, 4, 4), fake(fakes, 4, 4))[1]
    with fakes.mode:
        loss = F.linear(made, weight).sum()
        loss.backward()
    assert type(weight.grad) is FakeTensor


def test_arguments_that_matter_are_told_apart(fakes: FastFakes) -> None:
    one = fake(fakes, 4, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert run(fakes, _aten._to_copy.default, one, dtype=dtype)[1].dtype is dtype
    for size in ([2, 8], [8, 2], [16]):
        assert list(run(fakes, _aten.view.default, one, size)[1].shape) == size
    # 1 and True are equal, and different arguments
    assert run(fakes, _aten.sum.dim_IntList, one, [1], True)[1].shape == (4, 1)
    assert run(fakes, _aten.sum.dim_IntList, one, [1], False)[1].shape == (4,)


def test_sizes_that_resize_are_never_recipes(fakes: FastFakes) -> None:
    one = fake(fakes, 2)
    with fakes.mode:
        for size in (8, 16):
            result, _ = fakes.run(_aten.resize_.default, (one, [size]), {})
            assert result.shape == (size,)
            assert one.untyped_storage().nbytes() == 4 * size


def test_what_only_writes_or_gives_views_is_not_asked_of_the_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = FastFakes(FakeTensorMode(allow_non_fake_inputs=True))
    with fakes.mode:
        values = torch.empty(4, 6)
    monkeypatch.setattr(FastFakes, "_official", lambda *asked: pytest.fail(f"{asked[1]} is asked of the fake mode"))
    assert fakes.run(_aten.add_.Tensor, (values, values), {})[0] is values
    view = fakes.run(_aten.view.default, (values, [24]), {})[0]
    assert view.shape == (24,)
    assert view.untyped_storage()._cdata == values.untyped_storage()._cdata


@pytest.mark.parametrize("device", [None, "A100 80GB"])
def test_what_an_operator_gives_for_a_shape_is_asked_once(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused attention and state off the device among them."""
    recipes_for.cache_clear()
    asked: list[Any] = []
    original = FastFakes._official

    def official(self: FastFakes, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        asked.append(_key(func, args, kwargs))
        return original(self, func, args, kwargs)

    monkeypatch.setattr(FastFakes, "_official", official)
    predict_all(family("masked bert"), device, plans=["", "--checkpoint", "--offload optimizer"])
    fakes = [key for key in asked if key is not None and "FakeTensor" not in str(key) and "real" not in str(key)]
    assert len(fakes) > 20
    assert [str(key[0]) for key, count in Counter(fakes).items() if count > 1] == []
