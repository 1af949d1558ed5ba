"""Fake steps and their parts: against the ledger on the live model, and where a step cannot be predicted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload, measure
from memlab.errors import RefusalError, TraceError, WorkloadError
from memlab.hardware.roofline import Kind
from memlab.measuring.observation import RECOMPUTE
from memlab.plan import Plan
from memlab.predicting import predict, predict_all
from memlab.records import Category
from memlab.runtime.dispatch import TORCH
from memlab.trace.tracer import Tracer
from tests.techniques.models import gpt2, ragged_batch


class Computing(nn.Module):
    """Computes what a test gives it, from a linear layer and the input."""

    def __init__(self, compute: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.compute = compute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.compute(self.layer, inputs).sum()


def computing(compute: Callable[[nn.Module, torch.Tensor], torch.Tensor], **given: Any) -> Workload:
    model = Computing(compute)
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=(torch.randn(4, 8),), **given)


def peaks(workload: Workload, flags: str = "") -> tuple[int, int]:
    return predict(workload, flags).peak_allocated_bytes, measure(workload, flags, steps=1).peak_allocated_bytes


@pytest.fixture
def language_model() -> Workload:
    model = gpt2(512)
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=ragged_batch(512))


# -- whole steps and parts ---------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["", "--accumulate 2", "--checkpoint --bf16", "--adam8bit --offload optimizer"])
def test_whole_steps_are_those_of_the_ledger(language_model: Workload, flags: str) -> None:
    first, second = Tracer(language_model).steps(Plan.parse(flags))
    measured = measure(language_model, flags, steps=1)
    peak_bytes = max(first.observation.peak_bytes, second.observation.peak_bytes)
    assert peak_bytes == pytest.approx(measured.peak_allocated_bytes, rel=1e-4)
    assert second.host_bytes == measured.host_bytes
    assert (second.samples, second.tokens) == (measured.samples_per_step, measured.tokens_per_step)


def test_state_appears_in_the_first_step(language_model: Workload) -> None:
    first, second = Tracer(language_model).steps(Plan())
    count = sum(p.numel() for p in language_model.model.parameters())
    assert first.observation.baseline_bytes.get(Category.OPTIMIZER_STATE, 0) == 0
    assert second.observation.baseline_bytes[Category.OPTIMIZER_STATE] >= 8 * count


def test_steps_are_the_same_every_time(language_model: Workload) -> None:
    tracer = Tracer(language_model)
    one, other = tracer.steps(Plan())[-1], tracer.steps(Plan())[-1]
    assert [event[1:] for event in one.observation.raw] == [event[1:] for event in other.observation.raw]
    assert one.priced == other.priced
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("flags", "kind"), [("", None), ("--checkpoint", Kind.RERUN), ("--checkpoint selective", Kind.SELECTIVE_RERUN)]
)
def test_modules_that_run_again_are_priced(language_model: Workload, flags: str, kind: Kind | None) -> None:
    found = Tracer(language_model).one_pass(Plan.parse(flags)).priced
    reruns = [each.work for each in found if each.work.kind in (Kind.RERUN, Kind.SELECTIVE_RERUN)]
    blocks = language_model.model.transformer.h  # type: ignore[union-attr]
    assert [each.parts for each in reruns] == [len(list(block.modules())) for block in blocks] * (kind is not None)  # type: ignore[union-attr]
    assert {each.kind for each in reruns} == {kind} - {None}
    assert not any(each.kernels or each.flops or each.moved_bytes for each in reruns)


def test_what_a_model_checkpoints_itself_is_no_rerun_of_a_plan(language_model: Workload) -> None:
    language_model.model.gradient_checkpointing_enable()  # type: ignore[operator]
    found = Tracer(language_model).one_pass(Plan()).priced
    assert any(each.moment == RECOMPUTE for each in found)
    assert not any(each.work.kind == Kind.RERUN for each in found)


def test_operators_of_an_update_are_told_from_those_of_a_pass(language_model: Workload) -> None:
    tracer = Tracer(language_model)
    passed = tracer.one_pass(Plan())
    _, update = tracer.updates(Plan(), passed.trained)
    assert not any(passed.bill.columns["updating"])
    assert update.bill.columns["updating"] == update.bill.columns["kernels"]


def test_a_pass_has_as_many_rows_as_it_is_asked_for(language_model: Workload) -> None:
    tracer = Tracer(language_model)
    whole, half = tracer.one_pass(Plan()), tracer.one_pass(Plan(), 4)
    assert (whole.samples, half.samples) == (8, 4)
    assert whole.tokens == 2 * half.tokens
    # a batch of these rows, seen by the same tracer of another workload
    batch = {name: value[:4] for name, value in language_model.batch.items()}
    alone = Tracer(Workload(language_model.model, language_model.optimizers, batch=batch)).one_pass(Plan())
    assert half.observation.peak_bytes == alone.observation.peak_bytes


def test_a_pass_tells_which_parameters_are_trained() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    model[1].weight.requires_grad = False
    batch = ((torch.randn(4, 8),), torch.randn(4, 1))
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=F.mse_loss)
    tracer = Tracer(workload)
    trained = tracer.one_pass(Plan()).trained
    assert trained == {0, 1, 3, 4, 5}
    _, update = tracer.updates(Plan(), trained)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert update.observation.baseline_bytes[Category.GRADIENTS] == 4 * count


def test_a_probe_is_refused_where_a_batch_does_not_split() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    workload = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.randn(4, 8),))
    with pytest.raises(RefusalError):
        Tracer(workload).steps(Plan.parse("--accumulate 2"))


# -- models of many kinds ----------------------------------------------------------------------


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        return values * values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        return 2 * values * gradient


def test_functions_with_their_own_backward() -> None:
    predicted, measured = peaks(computing(lambda layer, inputs: _Square.apply(layer(inputs))))
    assert predicted == measured


def test_batches_with_words_and_nested_structures() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, inputs: dict[str, torch.Tensor], names: list[str], more: tuple[Any, ...]) -> torch.Tensor:
            assert names[0] == "first"
            return self.layer(inputs["x"]).sum() * len(names) + self.layer(more[0]).sum() * more[2]

    model, values = Reader(), torch.randn(4, 8)
    batch = {"inputs": {"x": values}, "names": ["first", "b", "c", "d"], "more": (values, None, 3)}
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=batch)
    for flags in ("", "--accumulate 2"):
        predicted, measured = peaks(workload, flags)
        assert predicted == pytest.approx(measured, rel=0.002)


def test_decisions_from_integers_are_the_real_ones() -> None:
    """A model may choose by its mask or its labels: they are real on the twin."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            if bool(mask.all()):
                return self.layer(inputs).sum()
            longest = int(mask.sum(1).max())
            return self.layer(inputs[:, :longest]).sum()

    model, inputs = Masked(), torch.randn(4, 64, 256)
    full, short = torch.ones(4, 64, dtype=torch.int64), torch.ones(4, 64, dtype=torch.int64)
    short[:, 8:] = 0
    found = []
    for mask in (full, short):
        workload = Workload(model, torch.optim.SGD(model.parameters()), batch={"inputs": inputs, "mask": mask})
        found.append(predict(workload).peak_allocated_bytes)
        assert found[-1] == measure(workload, steps=1).peak_allocated_bytes
    assert found[1] != found[0]


def test_a_model_in_bf16_as_written() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).bfloat16()
    batch = ((torch.randn(4, 8).bfloat16(),), torch.randn(4, 1).bfloat16())
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=F.l1_loss)
    predicted, measured = peaks(workload)
    assert predicted == measured


def test_several_optimizers() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizers = [
        torch.optim.AdamW(model[0].parameters()),
        torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
    ]
    batch = ((torch.randn(4, 8),), torch.randn(4, 1))
    predicted, measured = peaks(Workload(model, optimizers, batch=batch, loss_fn=F.l1_loss))
    assert predicted == measured


@pytest.mark.parametrize(
    "name",
    [
        "Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
        "Adafactor", "Muon",
    ],
)  # fmt: skip
def test_optimizers_of_torch(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.ReLU(), nn.Linear(64, 1, bias=False))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    batch = ((torch.randn(4, 8),), torch.randn(4, 1))
    load = Workload(model, optimizer, batch=batch, loss_fn=F.l1_loss)
    if name == "Adagrad" and TORCH == (2, 11):  # whose constructor alone makes the state
        with pytest.raises(TraceError, match=r"KeyError: 'sum'\); measure the plan instead"):
            peaks(load)
    else:
        predicted, measured = peaks(load)
        assert predicted == measured


@pytest.mark.parametrize("setting", ["foreach", "fused", "amsgrad", "maximize"])
def test_settings_of_adam(setting: str) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **{setting: True})
    batch = ((torch.randn(4, 8),), torch.randn(4, 1))
    predicted, measured = peaks(Workload(model, optimizer, batch=batch, loss_fn=F.l1_loss))
    assert predicted == measured


# -- what cannot be predicted -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "operator"),
    [
        (lambda layer, inputs: layer(inputs) * layer(inputs).mean().item(), "_local_scalar_dense"),
        (lambda layer, inputs: layer(inputs) if inputs.sum() > 0 else -layer(inputs), "_local_scalar_dense"),
        (lambda layer, inputs: layer(inputs) if (inputs > 0).any() else -layer(inputs), "_local_scalar_dense"),
        (lambda layer, inputs: layer(inputs) * sum(layer(inputs)[:, 0].tolist()), "_local_scalar_dense"),
        (lambda layer, inputs: layer(inputs)[layer(inputs)[:, 0].nonzero()], "nonzero"),
        (lambda layer, inputs: layer(inputs)[layer(inputs) > 0], "index"),
        (lambda layer, inputs: layer(inputs).masked_select(inputs > 0), "masked_select"),
        (lambda layer, inputs: layer(inputs) * layer(inputs).unique().numel(), "_unique2"),
    ],
    ids=["item", "if sum", "if any", "tolist", "nonzero", "boolean index", "masked select", "unique"],
)
def test_a_model_that_looks_at_values_is_named_the_operator(compute: Any, operator: str) -> None:
    workload = computing(compute)
    with pytest.raises(TraceError, match="depends on values") as error:
        predict(workload)
    assert operator in error.value.operator
    assert operator in str(error.value)
    assert all(p.grad is None for p in workload.model.parameters())
    assert measure(workload, steps=1).peak_allocated_bytes > 0


def test_values_asked_for_in_other_ways_end_in_one_line_too() -> None:
    workload = computing(lambda layer, inputs: layer(inputs) * float(layer(inputs).detach().numpy().sum()))
    with pytest.raises(TraceError, match=r"without values \(RuntimeError: .*numpy.*measure\(workload, plan\)") as error:
        predict(workload)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert predict(computing(lambda layer, inputs: layer(inputs))).peak_allocated_bytes > 0


def test_the_same_answer_for_all_plans() -> None:
    workload = computing(lambda layer, inputs: layer(inputs) * layer(inputs).mean().item())
    with pytest.raises(TraceError):
        predict_all(workload, plans=["", "--bf16"])


def test_a_loop_may_look_at_its_loss() -> None:
    """Values asked for outside of the model decide nothing about memory, as a rule."""
    model = nn.Linear(8, 8)

    def looking(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output, target)
        return loss if torch.isfinite(loss) else loss.detach()

    batch = ((torch.randn(4, 8),), torch.randn(4, 8))
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=looking)
    predicted, measured = peaks(workload)
    assert predicted == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("calls_model", [False, True])
def test_a_loss_function_that_refers_to_the_live_model_is_refused(has_gradients: bool, calls_model: bool) -> None:
    model = nn.Linear(8, 8)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        penalty = model(torch.ones(2, 8)).square().mean() if calls_model else model.weight.square().sum()
        return F.mse_loss(output, target) + penalty

    if has_gradients:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = [(p.grad, None if p.grad is None else p.grad.clone(), p._version) for p in model.parameters()]
    batch = ((torch.randn(4, 8),), torch.randn(4, 8))
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=loss_fn)
    with pytest.raises(TraceError, match=r"reaches a tensor of the live model|refers to the live model"):
        predict(workload)
    for parameter, (gradient, values, version) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert parameter._version == version
        assert gradient is None or torch.equal(gradient, values)


def test_a_loss_that_is_a_module_may_have_parameters() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return ((output - target).square() * self.weight).mean()

    model, criterion = nn.Linear(8, 8), Weighted()
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()])
    workload = Workload(model, optimizer, batch=((torch.randn(64, 8),), torch.randn(64, 8)), loss_fn=criterion)
    predicted, measured = peaks(workload)
    assert predicted == pytest.approx(measured, rel=0.01)
    assert criterion.weight.grad is None


def test_a_model_that_trains_nothing_is_named() -> None:
    workload = computing(lambda layer, inputs: layer(inputs).detach() + inputs)
    with pytest.raises((WorkloadError, TraceError)):
        predict(workload)
