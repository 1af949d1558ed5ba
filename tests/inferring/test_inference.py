"""What a call gets under inference, and that the model comes back as it was."""

from __future__ import annotations

import copy
import pickle
import signal
import threading

import pytest
import torch
from torch.nn import functional as F

import memlab
from memlab.errors import PlanError, RefusalError, SessionError, WorkloadError
from memlab.inferring.inference import explained, inference, inference_of, precision_of
from memlab.measuring.device import Device
from memlab.plan import Plan
from memlab.session.snapshot import Snapshot
from tests.helpers.fingerprint import differing, fingerprint
from tests.helpers.snapshots import changed_between
from tests.inferring.small_models import PROMPT, bert, generate, gpt2, llama, plain, t5


@pytest.mark.parametrize("make", [gpt2, llama, t5])
def test_generations_are_those_of_the_untouched_model(make) -> None:
    model = make().eval()
    expected = generate(model)
    with inference(model) as run:
        assert torch.equal(generate(model), expected)
    (call,) = run.record.calls
    assert (call.kind, call.rows, call.tokens, call.new_tokens, call.passes) == ("generate", 2, 12, 20, 10)


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_forwards_are_bit_equal_and_keep_no_graph(make) -> None:
    model = make().eval()
    expected = model(PROMPT).logits
    with inference(model) as run:
        logits = model(PROMPT).logits
    assert torch.equal(logits, expected)
    assert not logits.requires_grad
    assert not logits.is_inference()
    assert run.record.kind == "forward"


def test_what_it_returns_can_be_trained_on() -> None:
    model, probe = plain(), torch.nn.Linear(4, 3)
    with inference(model):
        features = model(torch.randn(5, 16))
        F.cross_entropy(probe(features), torch.tensor([0, 1, 2, 0, 1])).backward()
    assert probe.weight.grad is not None
    assert all(p.grad is None for p in model.parameters())


def test_dropout_is_off_in_its_calls_and_the_modes_are_the_cells_own() -> None:
    model = gpt2(dropout=0.5)
    model.transformer.h[1].eval()
    before = [module.training for module in model.modules()]
    expected = generate(copy.deepcopy(model).eval())
    with inference(model) as run:
        assert torch.equal(generate(model), expected)
        assert [module.training for module in model.modules()] == before
        model.eval()
        generate(model)
    assert not model.training
    assert run.record.notes == ("the model was in train mode: its calls ran in eval mode, without dropout",)


@pytest.mark.parametrize("flags", ["", "--bf16", "--fp16"])
@pytest.mark.parametrize("make", [gpt2, llama, bert, plain])
def test_everything_comes_back(make, flags: str) -> None:
    model = make()
    inputs = torch.randn(3, 16) if make is plain else PROMPT
    optimizer = torch.optim.AdamW(model.parameters())
    output = model(inputs)
    (output if make is plain else output.logits).square().mean().backward()
    optimizer.step()  # with gradients left, as between two cells
    workload = memlab.Workload(model, optimizer)
    values, marks = Snapshot(workload), fingerprint(model, [optimizer])
    with inference(model, flags):
        model(inputs)
        if hasattr(model, "generate"):
            generate(model)
    assert changed_between(values, Snapshot(workload)) == []
    assert differing(marks, fingerprint(model, [optimizer])) == []


@pytest.mark.parametrize("flags", ["", "--bf16"])
def test_everything_comes_back_after_an_error(flags: str) -> None:
    model = gpt2()
    workload = memlab.Workload(model)
    values, marks = Snapshot(workload), fingerprint(model)
    with pytest.raises(IndexError), inference(model, flags):
        model(PROMPT)
        model(torch.full((1, 3), 10_000))
    assert changed_between(values, Snapshot(workload)) == []
    assert differing(marks, fingerprint(model)) == []


def test_ctrl_c_while_weights_are_rounded_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain()
    before = Snapshot(memlab.Workload(model))
    original, calls = torch.Tensor.to, []

    def pressed(self: torch.Tensor, *args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch.Tensor, "to", pressed)
        inference(model, "--bf16")
    assert len(calls) >= 2
    assert inference_of(model) is None
    assert changed_between(before, Snapshot(memlab.Workload(model))) == []


def test_half_precision_follows_and_returns_fp32() -> None:
    model = llama().eval()
    expected = model(PROMPT, output_hidden_states=True)
    for flags, tolerance in (("--bf16", 0.03), ("--fp16", 0.003)):
        with inference(model, flags) as run:
            output = model(PROMPT, output_hidden_states=True)
            halved = {str(p.dtype) for p in model.parameters()}
        assert len(halved) == 1
        assert "16" in halved.pop()
        assert output.logits.dtype is torch.float32
        assert {hidden.dtype for hidden in output.hidden_states} == {torch.float32}
        assert output.past_key_values.layers[0].keys.dtype is not torch.float32
        torch.testing.assert_close(output.logits, expected.logits, atol=tolerance, rtol=0)
        assert run.record.label == f"--inference {flags}"
        assert run.record.host_bytes == sum(4 * p.numel() for p in model.parameters())
        # rotary frequencies stay as they are
        frequencies = sum(b.untyped_storage().nbytes() for b in model.buffers())
        assert run.record.breakdown["parameters"] == sum(2 * p.numel() for p in model.parameters()) + frequencies


def test_weights_that_are_half_already_are_left_alone_and_said_so() -> None:
    model = plain().bfloat16()
    with inference(model, "--bf16") as run:
        model(torch.randn(3, 16, dtype=torch.bfloat16))
    assert run.record.notes[0] == "nothing was rounded: the weights are bfloat16 already"
    assert run.record.host_bytes == 0


def test_a_frozen_model_needs_no_trainable_parameter() -> None:
    model = bert().requires_grad_(False)
    with inference(model) as run:
        model(PROMPT)
        assert run.graph_bytes() is None
    assert run.record.calls[0].rows == 2


def test_what_the_graph_would_have_kept_is_predicted_exactly() -> None:
    model = gpt2().eval()

    def live_bytes(*, with_graph: bool) -> int:
        ledger = Device().ledger()
        ledger.begin([])
        with ledger, torch.set_grad_enabled(with_graph):
            output = model(PROMPT)
        assert output is not None
        return ledger.live_bytes

    with inference(model) as run:
        model(PROMPT)
        kept = run.graph_bytes()
        with torch.no_grad():
            model(PROMPT.repeat(2, 1))
        assert run.graph_bytes() == kept  # a call whose gradients the cell switched off counts for nothing
    assert kept == live_bytes(with_graph=True) - live_bytes(with_graph=False) > 0


def test_gradients_stay_as_the_cell_has_them_around_the_calls() -> None:
    model, seen = plain(), []
    model[0].register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    with inference(model):
        model(torch.randn(2, 16))
        assert torch.is_grad_enabled()
        with torch.inference_mode():
            assert model(torch.randn(2, 16)).is_inference()
    assert seen == [False, False]


def test_a_plan_in_force_stays_in_force() -> None:
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    with memlab.fit(memlab.Workload(model, optimizer), "--precision pure-bf16") as session:
        with inference(model, optimizers=[optimizer]) as run:
            logits = model(PROMPT).logits
        assert logits.dtype is torch.float32
        masters = sum(tensor.nbytes for tensor in session.in_force.held_tensors)
        assert run.record.breakdown["parameters"] == masters + sum(2 * p.numel() for p in model.parameters())
        model(PROMPT, labels=PROMPT).loss.backward()
        optimizer.step()
        assert session.steps == 1
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_optimizer_state_and_gradients_are_named() -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 16)).sum().backward()
    optimizer.step()
    size = sum(4 * p.numel() for p in model.parameters())
    for flags in ("", "--bf16"):
        with inference(model, flags, optimizers=[optimizer]) as run:
            model(torch.randn(3, 16))
        assert run.record.breakdown["gradients"] == size
        assert run.record.breakdown["optimizer state"] == 2 * size + 4 * len(list(model.parameters()))


def test_calls_on_another_thread_are_served() -> None:
    """As a streamer has it: `generate` on a thread, its tokens read on this one."""
    model = gpt2(dropout=0.5)
    expected = generate(copy.deepcopy(model).eval())
    outputs = []
    with inference(model) as run:
        thread = threading.Thread(target=lambda: outputs.append(generate(model)))
        thread.start()
        thread.join()
    assert torch.equal(outputs[0], expected)
    assert run.record.calls[0].peak_allocated_bytes
    assert model.training


def test_giving_back_waits_for_a_call_on_another_thread() -> None:
    model, entered, go_on, dtypes = plain(), threading.Event(), threading.Event(), []

    def slowly(module: torch.nn.Module, _inputs: object) -> None:
        entered.set()
        go_on.wait(5)
        dtypes.append(module.weight.dtype)

    model[3].register_forward_pre_hook(slowly)
    run = inference(model, "--bf16")
    thread = threading.Thread(target=lambda: model(torch.randn(2, 16)))
    thread.start()
    assert entered.wait(5)
    timer = threading.Timer(0.05, go_on.set)
    timer.start()
    run.undo()
    thread.join()
    timer.join()
    assert dtypes == [torch.bfloat16]
    assert model[3].weight.dtype is torch.float32


def test_copies_and_pickles_of_the_model_are_free_of_it() -> None:
    model = gpt2()
    with inference(model):
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, loaded):
        assert torch.equal(generate(other.eval()), generate(model.eval()))


# -- refusals ---------------------------------------------------------------------------------


def test_training_under_inference_is_told() -> None:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(SessionError, match=r"backward\(\) under --inference.*train it without"):
        with inference(model):
            model(PROMPT, labels=PROMPT).loss.backward()
    model(PROMPT, labels=PROMPT).loss.backward()
    before = model.lm_head.weight.detach().clone()
    with pytest.raises(SessionError, match="SGD steps GPT2LMHeadModel under --inference"):
        with inference(model):
            optimizer.step()
    assert torch.equal(model.lm_head.weight, before)


def test_other_errors_are_left_alone() -> None:
    assert explained(RuntimeError("shapes do not match")) == ""
    assert explained(KeyError("does not require grad and does not have a grad_fn")) == ""


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--accumulate 2", "--accumulate with --inference: .*fewer rows"),
        ("--checkpoint", "--checkpoint with --inference: nothing is kept"),
        ("--adam8bit", "--optim with --inference: no optimizer runs"),
        ("--offload optimizer", "--offload with --inference: no optimizer runs"),
        ("--chunk-loss", "--loss with --inference: "),
        ("--precision pure-bf16", "allowed are --fp16 and --bf16"),
        ("--precision tf32", "allowed are --fp16 and --bf16"),
    ],
)
def test_settings_that_mean_nothing_are_refused(flags: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        precision_of(Plan.parse(flags))


def test_what_cannot_be_taken_over_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"expected a torch\.nn\.Module with parameters, got ReLU"):
        inference(torch.nn.ReLU())
    with pytest.raises(RefusalError, match="the CPU has no fp16 kernels for recurrent layers"):
        inference(torch.nn.LSTM(4, 4), "--fp16")
    model = plain()
    with inference(model) as run:
        with pytest.raises(SessionError, match="under inference already"):
            inference(model)
        assert inference_of(model) is run
        with pytest.raises(WorkloadError, match="no call of Sequential was seen"):
            _ = run.record
    assert inference_of(model) is None


def convolutions() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())


@pytest.mark.parametrize("flags", ["--bf16", "--fp16"])
def test_batch_norm_stays_in_fp32(flags: str) -> None:
    model, inputs = convolutions(), torch.randn(2, 3, 8, 8)
    model(inputs)  # statistics that are not what they began as
    before, expected = Snapshot(memlab.Workload(model)), copy.deepcopy(model).eval()(inputs)
    with inference(model, flags):
        output = model(inputs)
        assert model[0].weight.dtype is not torch.float32
        assert model[1].weight.dtype is torch.float32
    torch.testing.assert_close(output, expected, atol=0.05, rtol=0)
    assert changed_between(before, Snapshot(memlab.Workload(model))) == []


def test_a_recurrent_net_runs_in_bf16() -> None:
    model, inputs = torch.nn.LSTM(4, 6), torch.randn(5, 2, 4)
    before, (expected, _) = Snapshot(memlab.Workload(model)), model(inputs)
    with inference(model, "--bf16"):
        output, (hidden, _) = model(inputs)
    assert output.dtype is hidden.dtype is torch.float32
    torch.testing.assert_close(output, expected, atol=0.02, rtol=0)
    assert changed_between(before, Snapshot(memlab.Workload(model))) == []
