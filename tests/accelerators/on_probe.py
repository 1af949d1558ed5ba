"""memlab on the device `probe`; `test_probe.py` runs these in a process of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload, fit, measure, predict
from memlab.errors import RefusalError
from memlab.measuring.device import CountedDevice, Device, device_for
from memlab.plan import Tier
from memlab.rescue.rescuer import Rescuer
from memlab.runtime import accelerator
from memlab.techniques.adapters.base_bits import _Nf4
from memlab.techniques.offload.spill import Spill
from memlab.techniques.offload.transfers import SideStreams, copy_streams_of
from memlab.units import MIB
from tests.accelerators import probe

PROBE = torch.device("probe", 0) if hasattr(torch, "probe") else torch.device("privateuseone", 0)
STEPS = 4
# kernels of the CPU are reached by other operators there: a linear layer is a product and a sum
AS_THE_CPU = {"rtol": 1e-3, "atol": 2e-4}


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    global PROBE
    PROBE = probe.register()


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    torch.ops.probe.set_share(1.0)
    torch.ops.probe.set_total(probe.TOTAL_BYTES)
    gc.collect()
    accelerator.empty_cache()


def blocks(*, dropout: float = 0.0, width: int = 128) -> nn.Sequential:
    torch.manual_seed(0)

    def block() -> nn.Sequential:
        return nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, width),
        )

    return nn.Sequential(nn.Linear(64, width), nn.Sequential(*(block() for _ in range(4))), nn.Linear(width, 16))


@dataclass
class Run:
    losses: list[float]
    tensors: list[torch.Tensor]  # weights and moments, on the CPU
    notes: list[str]


def run(
    device: torch.device, plan: str, *, dropout: float = 0.0, undone_after: int | None = None, **settings: Any
) -> Run:
    model = blocks(dropout=dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(3)
    draws, losses = torch.Generator().manual_seed(1), []
    with fit(Workload(model, optimizer), plan, **settings) as session:
        for step in range(STEPS):
            if step == undone_after:
                session.undo()
            inputs, targets = (torch.randn(8, size, generator=draws).to(device) for size in (64, 16))
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        notes = [str(note) for note in session.notes]
    moments = (optimizer.state[each][name] for each in model.parameters() for name in ("exp_avg", "exp_avg_sq"))
    tensors = [*model.parameters(), *moments]
    assert all(tensor.device == device for tensor in tensors if tensor.numel() > 1)
    return Run(losses, [tensor.detach().cpu() for tensor in tensors], notes)


def same(one: Run, other: Run) -> bool:
    return one.losses == other.losses and all(map(torch.equal, one.tensors, other.tensors))


def as_the_cpu(there: Run, here: Run, rtol: float = AS_THE_CPU["rtol"], atol: float = AS_THE_CPU["atol"]) -> None:
    assert there.losses == pytest.approx(here.losses, rel=rtol)
    for one, other in zip(there.tensors, here.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


# --- what torch says of it --------------------------------------------------------------------------


def test_the_backend_is_asked_and_not_named() -> None:
    assert accelerator.device_type() == "probe"
    assert accelerator.is_in_use()
    assert accelerator.name_of(PROBE) == "probe"
    assert accelerator.device_name(PROBE) == "Probe"
    assert accelerator.every() == [PROBE]
    assert accelerator.with_index(torch.device("probe")) == PROBE
    assert accelerator.total_bytes(PROBE) == probe.TOTAL_BYTES
    assert accelerator.has_peaks(PROBE)
    assert accelerator.can_limit(PROBE)
    assert accelerator.has_streams(PROBE)
    assert accelerator.compute_capability(PROBE) is None
    assert not accelerator.allocates_like_cuda(PROBE)
    assert not accelerator.takes_other_data(PROBE)
    accelerator.empty_host_cache()  # torch's own would end the process


def test_counters_are_those_of_its_allocator() -> None:
    accelerator.reset_peaks(PROBE)
    before = accelerator.counters(PROBE)
    held = torch.empty(MIB, dtype=torch.uint8, device=PROBE)
    torch.empty(2 * MIB, dtype=torch.uint8, device=PROBE)
    after = accelerator.counters(PROBE)
    assert before is not None
    assert after is not None
    assert after.allocated - before.allocated == held.nbytes
    assert after.requested - before.requested == held.nbytes
    assert accelerator.peak_bytes(PROBE) - before.allocated == 3 * MIB
    free, total = accelerator.free_and_total(PROBE)
    assert total - free == after.reserved
    assert accelerator.most_bytes(PROBE) == total
    torch.ops.probe.set_share(0.5)
    assert accelerator.most_bytes(PROBE) == total // 2


def test_pinned_memory_and_streams_are_its_own() -> None:
    on_device = torch.ones(4096, device=PROBE)
    assert isinstance(copy_streams_of(on_device), SideStreams)
    kept = Spill(Tier.HOST).store(on_device)
    assert kept.is_pinned()
    assert kept.device.type == "cpu"


# --- plans ------------------------------------------------------------------------------------------


def test_without_a_plan_it_trains_as_the_cpu_does() -> None:
    as_the_cpu(run(PROBE, ""), run(torch.device("cpu"), ""))


@pytest.mark.parametrize(
    "plan",
    [
        "--checkpoint",
        "--offload activations",
        "--offload optimizer:disk",
        "--release-grads",
        "--checkpoint --offload activations",
    ],
)
def test_exact_plans_change_no_bit(plan: str) -> None:
    assert same(run(PROBE, plan), run(PROBE, ""))
    assert same(run(PROBE, plan, undone_after=2), run(PROBE, ""))


def test_dropout_is_drawn_again_from_the_generator_of_the_device() -> None:
    plain = run(PROBE, "", dropout=0.3)
    assert not same(plain, run(PROBE, ""))
    assert same(run(PROBE, "--checkpoint", dropout=0.3), plain)


@pytest.mark.parametrize(
    "plan", ["--accumulate 4", "--bf16", "--fp16", "--accumulate 2 --checkpoint --offload optimizer"]
)
def test_other_plans_are_as_on_the_cpu(plan: str) -> None:
    on_cpu = plan.replace("--offload optimizer", "").strip()
    tolerances = {"rtol": 0.03, "atol": 5e-3} if "16" in plan else AS_THE_CPU
    as_the_cpu(run(PROBE, plan), run(torch.device("cpu"), on_cpu), **tolerances)


def test_optimizer_state_leaves_it_and_is_updated_within_a_rounding() -> None:
    plain, offloaded = run(PROBE, ""), run(PROBE, "--offload optimizer")
    assert any("link" in note for note in offloaded.notes)
    for one, other in zip(offloaded.tensors, plain.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_four_bits_are_packed_by_torchs_operators_where_bitsandbytes_has_no_kernels() -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weight = torch.randn(96, 64)
    there, here = (_Nf4(weight.to(device), is_transposed=False) for device in (PROBE, torch.device("cpu")))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(there.tensors, here.tensors, strict=True))
    torch.testing.assert_close(there.unpacked(torch.float32).cpu(), here.unpacked(torch.float32))


@pytest.mark.parametrize("plan", ["--tile 2", "--chunk-loss"])
def test_plans_of_language_models_give_the_same_loss(plan: str) -> None:
    losses = {}
    for wanted in ("", plan):
        model, batch = language_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with fit(Workload(model, optimizer), wanted):
            losses[wanted] = []
            for _ in range(3):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[wanted].append(loss.item())
    assert losses[plan] == pytest.approx(losses[""], rel=1e-4)


def language_model() -> tuple[Any, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 2048, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = transformers.GPT2Config(
        **sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager"
    )
    tokens = torch.randint(0, 2048, (4, 32)).to(PROBE)
    return transformers.GPT2LMHeadModel(config).to(PROBE), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            "--offload params",
            "params: torch lets no parameter on probe have its values elsewhere; use --offload optimizer,activations",
        ),
        (
            "--offload frozen",
            "frozen: torch lets no parameter on probe have its values elsewhere; use --offload optimizer,activations",
        ),
        ("--lora --base nf4", "torch lets no parameter on probe have its values elsewhere; leave out --base"),
        ("--adam8bit", "bitsandbytes has no 8-bit kernels for probe; use --offload optimizer, or --optim adafactor"),
        ("--precision tf32", "tf32 needs a CUDA GPU of the Ampere generation or newer; use --bf16 here"),
    ],
)
def test_what_the_backend_lacks_is_refused_by_its_name(plan: str, said: str) -> None:
    if "8bit" in plan or "nf4" in plan:
        pytest.importorskip("bitsandbytes")
    if "lora" in plan:
        pytest.importorskip("peft")
    with pytest.raises(RefusalError) as caught:
        run(PROBE, plan)
    assert str(caught.value).partition(": ")[2] == said


# --- memory -----------------------------------------------------------------------------------------


def workload() -> Workload:
    model = blocks().to(PROBE)
    batch = torch.randn(32, 64, device=PROBE), torch.randn(32, 16, device=PROBE)
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=F.mse_loss)


def test_peaks_are_measured_by_its_counters() -> None:
    measured = measure(workload(), steps=2)
    assert measured.device == "Probe (4.00 GiB)"
    assert measured.peak_allocated_bytes == accelerator.peak_bytes(PROBE)
    assert measured.peak_reserved_bytes is not None
    assert measured.peak_reserved_bytes >= measured.peak_allocated_bytes
    assert all(seconds > 0 for seconds in measured.step_seconds)
    # blocks are rounded up to 512 bytes, and what the ledger saw is all there is
    assert 0.9 * measured.peak_allocated_bytes <= sum(measured.breakdown.values()) - measured.breakdown.get(
        "allocator, unused", 0
    )


def test_a_backend_without_counters_is_counted_by_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on MPS."""
    counted = measure(workload(), steps=1)
    monkeypatch.setattr(accelerator, "has_peaks", lambda _device: False)
    device = device_for(PROBE)
    assert type(device) is Device
    by_ledger = measure(workload(), steps=1)
    assert by_ledger.device == "probe ledger"
    assert by_ledger.peak_reserved_bytes is None
    assert by_ledger.peak_allocated_bytes == pytest.approx(counted.peak_allocated_bytes, rel=0.1)
    with pytest.raises(torch.OutOfMemoryError):
        measure(workload(), steps=1, device=device_for(PROBE, by_ledger.peak_allocated_bytes // 2))


def test_a_capacity_is_the_allocators_and_is_given_back() -> None:
    torch.ops.probe.set_share(0.75)
    device = device_for(PROBE, 2 * 2**30)
    assert isinstance(device, CountedDevice)
    assert device.name == "Probe (capacity 2.00 GiB)"
    assert torch.ops.probe.share() == pytest.approx(0.5)
    device.close()
    assert torch.ops.probe.share() == 0.75


def wide(batch_rows: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    model = blocks(width=256).to(PROBE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(1)

    def step() -> float:
        inputs, targets = (torch.randn(batch_rows, size, generator=draws).to(PROBE) for size in (64, 16))
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, optimizer, step


def test_running_out_of_memory_is_rescued() -> None:
    _, _, step = wide(2048)
    expected = [step() for _ in range(3)]
    needed_bytes = accelerator.peak_bytes(PROBE)
    gc.collect()

    model, optimizer, step = wide(2048)
    accelerator.empty_cache()
    counted = accelerator.counters(PROBE)
    assert counted is not None
    torch.ops.probe.set_total(counted.reserved + (needed_bytes - counted.allocated) // 2)
    with pytest.raises(torch.OutOfMemoryError, match="probe out of memory"):
        step()
    model, optimizer, step = wide(2048)
    with fit(Workload(model, optimizer), rescue=Rescuer()) as session:
        found = [step() for _ in range(3)]
        assert session.plan.label != ""
    assert found == pytest.approx(expected, rel=1e-5)


def test_predictions_say_that_they_are_of_allocated_bytes() -> None:
    subject = workload()
    predicted, measured = predict(subject), measure(subject, steps=1)
    assert predicted.device == "Probe"
    assert predicted.peak_reserved_bytes is None
    assert (
        predicted.notes[0] == "allocated bytes only: memlab has no model of the allocator of Probe, which reserves more"
    )
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.2)


# --- in a notebook ----------------------------------------------------------------------------------

CELL = """%%memfit --accumulate 2 --checkpoint
for _ in range(4):
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_receipt_of_a_cell_names_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell

    from memlab.jupyter.magic import unload

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "memlab")
    model = blocks().to(PROBE)
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "F": F}
    names |= {"inputs": torch.randn(8, 64, device=PROBE), "targets": torch.randn(8, 16, device=PROBE)}
    shell.push(names)
    try:
        result = shell.run_cell(CELL)
        out = capsys.readouterr().out
        shell.run_cell("%memfit undo")
    finally:
        unload(shell)
        shell.reset()
    assert result.success
    assert "Probe (4.00 GiB)" in out
    assert "reserved" in out
