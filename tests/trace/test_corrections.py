"""Fakes that are put right, each against the real operator."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.trace.fast_fakes import FastFakes, corrected

aten = torch.ops.aten


def described(result):
    """Shape, dtype and bytes of the storage of every tensor in a result."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [None if r is None else (tuple(r.shape), r.dtype, r.untyped_storage().nbytes()) for r in results]


def both(func, *args):
    """The real result, and the fake one as the trace sees it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args]
    out, _ = FastFakes(mode).run(func, tuple(fakes), {})
    return described(func(*args)), described(out)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("loss", [aten.mse_loss.default, aten.smooth_l1_loss.default], ids=["mse", "smooth l1"])
def test_a_reduced_loss_keeps_the_storage_of_its_elements(loss, reduction):
    real, fake = both(loss, torch.randn(8, 16), torch.randn(8, 16), reduction)
    assert fake == real


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_other_losses_do_so_too(reduction):
    likely, target = torch.rand(8, 16), torch.ones(8, 16)
    for loss, args in (
        (aten.binary_cross_entropy.default, (likely, target, None, reduction)),
        (aten.soft_margin_loss.default, (likely, target, reduction)),
    ):
        real, fake = both(loss, *args)
        assert fake == real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norm_of_halves_with_fp32_weights(dtype):
    values, weight, bias = torch.randn(2, 8, 4, 4, dtype=dtype), torch.ones(8), torch.zeros(8)
    real, fake = both(aten.native_group_norm.default, values, weight, bias, 2, 8, 16, 4, 1e-5)
    assert fake == real
    _, mean, rstd = torch.native_group_norm(values, weight, bias, 2, 8, 16, 4, 1e-5)
    args = (torch.ones_like(values), values, mean, rstd, weight, 2, 8, 16, 4, [True, True, True])
    real, fake = both(aten.native_group_norm_backward.default, *args)
    assert fake == real


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_other_norms_of_halves(weights):
    weight, bias = torch.ones(8, dtype=weights), torch.zeros(8, dtype=weights)
    real, fake = both(aten.native_layer_norm.default, torch.randn(4, 8).bfloat16(), [8], weight, bias, 1e-5)
    assert fake == real
    values, mean, variance = torch.randn(2, 8, 4, 4).bfloat16(), torch.zeros(8), torch.ones(8)
    if weights is torch.float32:
        real, fake = both(aten.native_batch_norm.default, values, weight, bias, mean, variance, True, 0.1, 1e-5)
        assert fake == real


def test_the_gradient_of_a_layer_norm_is_contiguous():
    values, weight, bias = torch.randn(4, 6, 8), torch.ones(8), torch.zeros(8)
    _, mean, rstd = torch.native_layer_norm(values, [8], weight, bias, 1e-5)
    args = (torch.randn(4, 8, 6).transpose(1, 2), values, [8], mean, rstd, weight, bias, [True, True, True])
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tuple(mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args)
    fake, _ = FastFakes(mode).run(aten.native_layer_norm_backward.default, fakes, {})
    assert fake[0].stride() == aten.native_layer_norm_backward.default(*args)[0].stride() == (48, 8, 1)


@pytest.mark.parametrize("train", [True, False])
def test_the_workspace_of_a_recurrent_layer_on_the_cpu(train):
    steps, rows, width = 5, 3, 16
    weights = (
        torch.randn(4 * width, width),
        torch.randn(4 * width, width),
        torch.zeros(4 * width),
        torch.zeros(4 * width),
    )
    state = torch.zeros(rows, width), torch.zeros(rows, width)
    sequence = torch.randn(steps, rows, width)
    args = (sequence, *weights, *state, False, [], 2, width, 1, True, False, False, train)
    real, fake = both(aten.mkldnn_rnn_layer.default, *args)
    assert sum(entry[2] for entry in fake) == sum(entry[2] for entry in real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("first", "second", "offs"),
    [((8, 16), (2, 16, 24), [3, 8]), ((16, 8), (8, 24), [3, 8]), ((2, 8, 16), (16, 24), [10, 24]),
     ((2, 8, 16), (2, 16, 24), None)],
    ids=["rows", "what is summed over", "columns", "matrices"],
)  # fmt: skip
def test_products_of_groups(first, second, offs, dtype):
    offsets = None if offs is None else torch.tensor(offs, dtype=torch.int32)
    real, fake = both(
        aten._grouped_mm.default, torch.randn(first, dtype=dtype), torch.randn(second, dtype=dtype), offsets
    )
    assert fake == real


@pytest.mark.parametrize("as_tensors", [True, False])
def test_connectionist_temporal_classification(as_tensors):
    """Its results depend on the lengths, which have their values; others of the same shape have other results."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = FastFakes(mode)
    log_probs, targets = torch.randn(20, 4, 12).log_softmax(-1), torch.randint(1, 12, (4, 5))
    for lengths in ([5, 3, 4, 2], [2, 3, 2, 2]):
        both_lengths = [20] * 4, lengths
        if as_tensors:
            both_lengths = tuple(map(torch.tensor, both_lengths))
        loss = aten._ctc_loss.Tensor if as_tensors else aten._ctc_loss.default
        backward = aten._ctc_loss_backward.Tensor if as_tensors else aten._ctc_loss_backward.default
        real = loss(log_probs, targets, *both_lengths)
        fake, _ = fakes.run(loss, (mode.from_tensor(log_probs), targets, *both_lengths), {})
        assert described(fake) == described(real)
        real = backward(torch.ones(4), log_probs, targets, *both_lengths, *real, 0)
        args = (mode.from_tensor(torch.ones(4)), mode.from_tensor(log_probs), targets, *both_lengths, *fake, 0)
        assert described(fakes.run(backward, args, {})[0]) == described(real)


def test_connectionist_temporal_classification_in_half_precision_is_refused_as_it_is():
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    halves = torch.randn(20, 4, 12).bfloat16()
    rest = torch.randint(1, 12, (4, 5)), [20] * 4, [5] * 4
    with pytest.raises(NotImplementedError, match="not implemented for"):
        aten._ctc_loss.default(halves, *rest)
    with pytest.raises(NotImplementedError, match="not implemented for"):
        FastFakes(mode).run(aten._ctc_loss.default, (mode.from_tensor(halves), *rest), {})


def test_other_operators_are_left_alone():
    result = torch.ones(2)
    assert corrected(FakeTensorMode(), aten.relu.default, (result,), {}, result) is result
