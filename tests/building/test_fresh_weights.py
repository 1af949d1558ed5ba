"""Models made by callables: the weights of the usual way, in the format and with the ties they should have."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memlab
from memlab.errors import BuildError
from tests.building.built_models import families, tensors
from tests.building.conftest import LooksAtValues, Rotary, Tied, WritesLate, copied_layers, plain, recurrent

FACTORIES = [plain, copied_layers, recurrent, Tied, WritesLate, LooksAtValues]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def both_ways(factory: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The usual way and `build` from the same seed; the random state must go on alike."""
    torch.manual_seed(5)
    usual = factory().to(dtype)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    built = memlab.build(factory, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state)
    return usual, built


def differing(usual: nn.Module, built: nn.Module) -> list[str]:
    expected, found = tensors(usual), tensors(built)
    assert list(found) == list(expected)
    return [
        name
        for name, tensor in found.items()
        if tensor.dtype != expected[name].dtype or not tensor.equal(expected[name])
    ]


@pytest.mark.few
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)
def test_weights_are_those_of_the_usual_way_bit_for_bit(factory, dtype, wide_bytes):
    usual, built = both_ways(factory, dtype)
    assert differing(usual, built) == []
    assert [p.requires_grad for p in built.parameters()] == [p.requires_grad for p in usual.parameters()]


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", sorted(families()))
def test_models_of_transformers_are_those_of_the_usual_way(family, dtype, wide_bytes):
    model_class, config = families()[family]
    usual, built = both_ways(lambda: model_class(copy.deepcopy(config)), dtype)
    # rotary frequencies are made in fp32 by choice, and `.to` rounds them
    kept = {name for name, tensor in tensors(built).items() if tensor.dtype == torch.float32}
    assert all(name.endswith("inv_freq") for name in kept)
    assert bool(kept) == (family == "Llama")
    assert set(differing(usual, built)) == kept


def test_parameters_do_become_narrow_while_the_factory_works(one_at_a_time):
    seen = []

    def factory() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        with torch._C.DisableTorchFunction():  # which narrow parameters answer otherwise
            seen.extend(parameter.dtype for parameter in model.parameters())
        return model

    memlab.build(factory, dtype="bf16")
    assert seen == [torch.bfloat16] * 10 + [torch.float32] * 2


def test_what_is_read_again_is_rounded_once_more_and_no_worse(one_at_a_time):
    def factory() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        for layer in model:
            layer.weight.data.mul_(0.7)
        return model

    usual, built = both_ways(factory, torch.bfloat16)
    for expected, found in zip(usual.parameters(), built.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    assert differing(usual, built)  # else the sentence in the docstring is wrong


def test_formats_that_a_module_chose_are_kept(wide_bytes):
    torch.manual_seed(1)
    plainly = Rotary()
    torch.manual_seed(1)
    built = memlab.build(Rotary, dtype="bf16")
    formats = {name: tensor.dtype for name, tensor in tensors(built).items()}
    whole = {"frequencies": torch.float32, "router.weight": torch.float32, "router.bias": torch.float32}
    whole |= {"steps": torch.int64, "mask": torch.bool, "norm.num_batches_tracked": torch.int64}
    assert formats == {name: whole.get(name, torch.bfloat16) for name in formats}
    # computed in fp32, then rounded: in bf16, `arange` skips numbers above 256
    for name, tensor in tensors(plainly).items():
        assert tensors(built)[name].equal(tensor.to(formats[name])), name


@pytest.mark.parametrize("factory", [lambda: nn.Linear(300, 300), Rotary], ids=["uniform", "computed"])
def test_computing_in_the_target_format_would_give_other_weights(factory):
    usual, _ = both_ways(factory, torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(5)
        directly = factory()
    finally:
        torch.set_default_dtype(torch.float32)
    assert differing(usual, directly)


def test_a_row_of_padding_stays_zero(one_at_a_time):
    model = memlab.build(lambda: nn.Sequential(*(nn.Embedding(9, 4, padding_idx=2) for _ in range(4))), dtype="bf16")
    assert not any(layer.weight[2].any() for layer in model)


def test_ties_and_lists_of_weights_hold(one_at_a_time):
    tied = memlab.build(Tied, dtype="bf16")
    assert tied.head.weight is tied.embedding.weight
    lstm = memlab.build(recurrent, dtype="bf16")
    assert all(
        weight is getattr(lstm, name) for weight, name in zip(lstm._flat_weights, lstm._flat_weights_names, strict=True)
    )


def test_storage_that_two_parameters_share_is_shared_until_the_end(one_at_a_time):
    def factory() -> nn.Module:
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
        model[3].weight = nn.Parameter(model[0].weight)  # narrow by now
        nn.init.normal_(model[0].weight)
        return model

    usual, built = both_ways(factory, torch.bfloat16)
    assert differing(usual, built) == []
    assert built[3].weight.equal(built[0].weight)


def test_a_weight_whose_norm_is_taken_out_of_it(wide_bytes):
    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))

    assert differing(*both_ways(factory, torch.bfloat16)) == []


def test_a_lazy_module_takes_its_format_when_it_is_first_called():
    model = memlab.build(lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)), dtype="bf16")
    assert model(torch.ones(1, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_two_models_in_a_row_have_weights_of_their_own():
    torch.manual_seed(0)
    first, second = (memlab.build(lambda: nn.Linear(4, 4), dtype="bf16") for _ in range(2))
    assert not first.weight.equal(second.weight)


def test_the_model_trains():
    model = memlab.build(Tied, dtype="bf16")
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.body(model.embedding(torch.arange(8)))).float().logsumexp(-1).mean().backward()
    before = model.head.weight.detach().clone()
    optimizer.step()
    assert not model.head.weight.equal(before)


def test_without_a_dtype_the_factory_decides():
    assert memlab.build(lambda: nn.Linear(2, 2)).weight.dtype == torch.float32
    assert memlab.build(lambda: nn.Linear(2, 2).half(), dtype="bf16").weight.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_default_dtype_of_the_users_is_what_full_precision_means(dtype, one_at_a_time):
    torch.set_default_dtype(torch.float64)
    try:
        assert differing(*both_ways(plain, dtype)) == []
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_default_device_of_the_users_comes_back():
    torch.set_default_device("meta")
    try:
        model = memlab.build(plain, dtype="bf16")
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert {tensor.device.type for tensor in tensors(model).values()} == {"cpu"}


def test_nothing_is_left_behind_when_the_factory_raises():
    def factory() -> nn.Module:
        nn.Linear(100, 100)
        torch.set_default_dtype(torch.float64)
        raise ArithmeticError("the factory's own")

    made, state = nn.Parameter.__dict__["__new__"], torch.get_rng_state()
    with pytest.raises(ArithmeticError, match="the factory's own"):
        memlab.build(factory, dtype="bf16")
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    assert nn.Parameter.__dict__["__new__"] is made


def test_models_made_by_other_threads_meanwhile_are_left_alone(one_at_a_time):
    elsewhere = []

    def factory() -> nn.Module:
        thread = threading.Thread(target=lambda: elsewhere.append(plain()))
        thread.start()
        thread.join()
        return plain()

    memlab.build(factory, dtype="bf16")
    assert {p.dtype for p in elsewhere[0].parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factory": 3}, r"factory 3: expected a callable without arguments, a Transformers configuration"),
        ({"factory": nn.Linear(1, 1)}, r"Linear is built already: give what makes it"),
        ({"factory": lambda: "no model"}, r"returned str, not a torch.nn.Module"),
        ({"factory": plain, "dtype": "int8"}, r"dtype 'int8': a model is built in one of fp16, bf16, fp32, fp64"),
        ({"factory": plain, "dtype": torch.int8}, r"dtype torch.int8: a model is built in one of"),
        ({"factory": plain, "device": "meta"}, r"device 'meta' holds no values"),
        ({"factory": plain, "device": "nowhere"}, r"device 'nowhere' cannot be used here .*; devices here: cpu"),
        ({"factory": lambda: nn.Linear(2, 2, device="meta")}, r"on the meta device: weight, bias"),
    ],
)
def test_errors_say_what_is_allowed(arguments, message):
    with pytest.raises(BuildError, match=message):
        memlab.build(**arguments)
