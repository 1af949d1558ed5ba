"""Functions of the loop's on tensors that are kept in another form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memlab.runtime.touch import Touch, own_class

TRUE = 1 + 2**-10  # no number in bf16


class Kept:
    """A parameter of ones in bf16 that stand for another number, and what is told of it."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.read: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        self.touch = Touch(lambda: [self.parameter], self._read, lambda _tensor, values: self.kept.append(values))
        self.touch.watch()

    def _read(self, tensor: torch.Tensor, _frame: Any) -> torch.Tensor:
        self.read.append(tensor.detach().float() * TRUE)
        return self.read[-1]


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    assert own_class(kept.parameter) is nn.Parameter
    kept.touch.leave()
    assert type(kept.parameter) is nn.Parameter


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.shape,
        lambda p: p.grad,
        lambda p: p.numel(),
        lambda p: p.dtype,
        lambda p: torch.optim.SGD([p], lr=1.0).zero_grad(),
        lambda p: p.register_hook(lambda gradient: gradient),
        lambda p: setattr(p, "grad", torch.ones(2)),  # made like what is read
    ],
)
def test_what_needs_no_values_reads_none(use: Callable[[Any], Any], kept: Kept) -> None:
    use(kept.parameter)
    assert kept.read == []


@pytest.mark.parametrize(
    ("use", "is_held"),
    [
        (lambda p: p * 2, False),  # torch keeps the 2
        (lambda p: p.square(), True),  # in the graph
        (lambda p: p.clone(), False),
        (lambda p: p.data, True),
        (lambda p: p.detach(), True),
        (lambda p: p.view(-1)[:1], True),
        (lambda p: p.detach().numpy(), True),
        (repr, False),
        (torch.zeros_like, False),
        (torch.no_grad()(lambda p: torch.zeros(2).lerp_(p, 0.5)), False),
        (torch.no_grad()(lambda p: torch._foreach_lerp_([torch.zeros(2)], [p], 0.5)), False),
        (lambda p: nn.utils.parameters_to_vector([p, p]), True),  # by their views, for a moment
        (torch.no_grad()(lambda p: torch.dot(p, torch.ones(2, dtype=torch.bfloat16))), False),  # as beside a gradient
        (torch.no_grad()(lambda p: p.fill_(3)), True),
        (torch.no_grad()(lambda p: p.__setitem__(0, 3)), True),
        (torch.no_grad()(lambda p: torch._foreach_mul_([p, p], 2)), True),
        (torch.no_grad()(lambda p: torch.add(p, 1, out=p)), True),
        (lambda p: nn.init.zeros_(p), True),
        (lambda p: nn.init.uniform_(p), True),
    ],
)
def test_values_are_kept_where_somebody_holds_them_or_has_written_to_them(
    use: Callable[[Any], Any], is_held: bool, kept: Kept
) -> None:
    _result = use(kept.parameter)
    assert kept.read
    assert bool(kept.kept) is is_held
    assert kept.parameter.dtype is torch.float32
    with torch._C.DisableTorchFunctionSubclass():
        assert kept.parameter.dtype is torch.bfloat16
        assert kept.parameter.tolist() == [1.0, 1.0]


def test_a_graph_leads_to_the_tensor_as_it_is_kept(kept: Kept) -> None:
    parameter = kept.parameter
    result = parameter.clone()
    (result * torch.tensor([1.0, 2.0])).sum().backward()
    assert result.tolist() == pytest.approx([TRUE, TRUE])
    assert parameter.grad is not None
    assert (parameter.grad.dtype, parameter.grad.tolist()) == (torch.bfloat16, [1.0, 2.0])
    view = parameter.view(-1)
    assert view.tolist() == [TRUE, TRUE]
    assert view.untyped_storage().data_ptr() == kept.kept[-1].data_ptr()  # what is written to it arrives there
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        parameter.mul_(2)


def test_functions_that_give_their_tensor_back_give_it_back(kept: Kept) -> None:
    parameter = kept.parameter
    with torch.no_grad():
        assert parameter.add_(1) is parameter
        assert parameter.float() is parameter
        assert parameter.contiguous() is parameter


def test_what_is_written_in_the_kept_form_is_computed_in_it(kept: Kept) -> None:
    gradient = torch.zeros(2, dtype=torch.bfloat16)
    with torch.no_grad():
        gradient.lerp_(kept.parameter, 0.5)
        torch.add(kept.parameter, gradient, out=gradient)
    assert gradient.tolist() == [1.5, 1.5]


def test_other_data_is_the_owners_to_take() -> None:
    kept, told = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), []
    touch = Touch(
        lambda: [kept], lambda tensor, _frame: tensor.detach().float(),
        replace=lambda _tensor, values: told.append(values) or len(told) < 3,
    )  # fmt: skip
    touch.watch()
    with torch.no_grad():
        kept.data = torch.full((2,), 2.0)
        assert kept.set_(torch.full((2,), 3.0)) is kept  # type: ignore[call-overload]
        assert kept.tolist() == [1.0, 1.0]
        kept.data = torch.full((2,), 4.0)
        assert kept.tolist() == [4.0, 4.0]
    assert [values[0].item() for values in told] == [2.0, 3.0, 4.0]


def test_a_parameter_can_be_made_of_one_that_is_watched(kept: Kept) -> None:
    made = nn.Parameter(kept.parameter)
    assert type(made) is nn.Parameter
    assert made.tolist() == [TRUE, TRUE]


def test_tensors_of_two_owners_in_one_function_are_both_read() -> None:
    one, other = torch.ones(2), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    first = Touch(lambda: [one], lambda tensor, _frame: tensor.detach() * 2)
    second = Touch(lambda: [other], lambda tensor, _frame: tensor.detach().float() * 3)
    first.watch()
    second.watch()
    with torch.no_grad():
        assert (one + other).tolist() == (other + one).tolist() == [5.0, 5.0]
    first.leave()
    second.leave()


def test_tensors_of_a_class_of_the_users_are_left_alone() -> None:
    class Own(torch.Tensor):
        pass

    own, told = torch.ones(2).as_subclass(Own), []
    Touch(lambda: [own], lambda tensor, _frame: told.append(tensor)).watch()
    own.data.add_(1)
    assert type(own) is Own
    assert told == []
