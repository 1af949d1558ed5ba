"""Cross-entropy in tiles: exact, and without the logits."""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memlab import RefusalError, Workload, fit, measure, predict
from memlab.errors import SessionError
from memlab.runtime.lazy import LazyTensor
from memlab.techniques.accumulation import micro_outputs
from memlab.techniques.chunked_loss import tiles
from memlab.techniques.chunked_loss.deferred import DeferredLogits
from tests.techniques.models import distance, gpt2, gradients, ragged_batch, workload


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of logits that were computed in full after all."""
    shapes: list[torch.Size] = []
    original = LazyTensor.value

    def noted(lazy: LazyTensor) -> torch.Tensor:
        shapes.append(lazy.shape)
        return original(lazy)

    monkeypatch.setattr(LazyTensor, "value", noted)
    return shapes


class Head(nn.Module):
    """Hidden rows to logits, and a loss of the test's choice."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.loss = nn.Linear(8, 16), nn.Linear(16, 3000, bias=bias), loss

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.body(inputs)), targets)


def head_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 3000, (4, 6), generator=generator)
    targets[1, 3:] = -100
    return torch.randn(4, 6, 8, generator=generator), targets


DEFERRED: dict[str, Callable[[Any, Any], Any]] = {
    "view": lambda x, y: F.cross_entropy(x.view(-1, 3000), y.view(-1)),
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "shifted": lambda x, y: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, 3000), y[:, 1:].reshape(-1)),
    "float and sum": lambda x, y: F.cross_entropy(x.float().reshape(-1, x.size(-1)), y.view(-1), reduction="sum"),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.to(torch.float32).view(24, -1), y.view(-1)),
    "ignored": lambda x, y: F.cross_entropy(x.view(-1, 3000), y.clamp(min=0).view(-1), ignore_index=0) * 3,
}
ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "smoothed": lambda x, y: F.cross_entropy(x.view(-1, 3000), y.view(-1), label_smoothing=0.1),
    "smoothed sum": lambda x, y: F.cross_entropy(x.view(-1, 3000), y.view(-1), reduction="sum", label_smoothing=0.1),
    "weighted": lambda x, y: F.cross_entropy(x.view(-1, 3000), y.view(-1), weight=WEIGHTS),
    "weighted and smoothed": lambda x, y: nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2)(x.view(-1, 3000), y.view(-1)),
    "probabilities": lambda x, y: F.cross_entropy(x.view(-1, 3000), teacher(y)),
    "each": lambda x, y: F.cross_entropy(x.view(-1, 3000), y.view(-1), reduction="none").mean(),
    "capped": lambda x, y: F.cross_entropy((30 * torch.tanh(x / 30)).view(-1, 3000), y.view(-1)),
    "a temperature": lambda x, y: F.cross_entropy(x.div(torch.tensor(0.7)).view(-1, 3000), y.view(-1)),
    "with a z-loss": lambda x, y: (
        F.cross_entropy(x.view(-1, 3000), y.view(-1)) + 1e-2 * torch.logsumexp(x, dim=-1).square().mean()
    ),
    "log-probabilities": lambda x, y: -chosen(x.log_softmax(-1), y).mean(),
    "of one text each": lambda x, y: -torch.stack([chosen(F.log_softmax(row, -1), of) for row, of in zip(x, y, strict=True)]).mean(),
    "taken along": lambda x, y: -torch.take_along_dim(torch.log_softmax(x, 2), y.clamp(min=0).unsqueeze(-1), -1).sum(),
    "a likelihood": lambda x, y: F.nll_loss(F.log_softmax(x.view(-1, 3000), dim=-1, dtype=torch.float64), y.view(-1)),
    "distilled": lambda x, y: F.kl_div(F.log_softmax(x.flatten(0, 1) / 2, -1), teacher(y), reduction="batchmean") * 4,
    "distilled from logs": lambda x, y: F.kl_div(F.log_softmax(x.view(24, -1), -1), teacher(y).log(), log_target=True),
    "an entropy": lambda x, y: -(F.softmax(x, -1) * F.log_softmax(x, -1)).sum(-1).mean() + chosen(x, y).mean(),
    "TRL's": lambda x, y: trl_loss(x, y, 1.0),
    "TRL's with a temperature": lambda x, y: trl_loss(x[:, :-1], y[:, 1:], 0.7),
    "masked rows": lambda x, y: F.cross_entropy(x[y != -100] * 2 + 1, y[y != -100], reduction="sum") / 7,
    "preferred": lambda x, y: -F.logsigmoid(
        chosen(x[:2].log_softmax(-1), y[:2]).sum(-1) - chosen(x[2:].log_softmax(-1), y[2:]).sum(-1)
    ).mean(),
}  # fmt: skip
FULL: dict[str, Callable[[Any, Any], Any]] = {
    "transposed": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "squared too": lambda x, y: F.cross_entropy(x.view(-1, 3000), y.view(-1)) + x.square().mean(),
    "learned weights": lambda x, y: F.cross_entropy(x.view(-1, 3000), teacher(y).requires_grad_()),
    "times classes": lambda x, y: F.cross_entropy((x * WEIGHTS).view(-1, 3000), y.view(-1)),
    "written into": lambda x, y: written(x, y),
}
WEIGHTS = torch.rand(3000, generator=torch.Generator().manual_seed(1))


def teacher(targets: torch.Tensor) -> torch.Tensor:
    return torch.randn(targets.numel(), 3000, generator=torch.Generator().manual_seed(2)).softmax(-1)


def chosen(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def trl_loss(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    chances = selective_log_softmax(logits, targets.clamp(min=0), temperature)
    return -chances.mean() + 0.1 * entropy_from_logits(logits, chunk_size=5).mean()


def written(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A copy from before, and a view, of logits that are written to afterwards."""
    before, view = logits.log_softmax(-1), logits.view(-1, 3000)
    logits.mul_(2)
    return F.cross_entropy(view, targets.view(-1)) - chosen(before, targets).mean()


@pytest.mark.few
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", [*DEFERRED, *ROWS, *FULL])
@pytest.mark.parametrize("tile_bytes", [4 * 3000 * 5, 2**25])
def test_gradients_are_those_of_the_plain_loss(
    name: str, bias: bool, tile_bytes: int, computed: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_TILE_BYTES", tile_bytes)
    model, batch = Head((DEFERRED | ROWS | FULL)[name], bias), head_batch()
    plain = model(*batch)
    plain.backward()
    expected = gradients(model)
    with fit(workload(model), "--chunk-loss"):
        tiled = model(*batch)
        tiled.backward()
    assert distance(gradients(model), expected) < 2e-6
    assert tiled.item() == pytest.approx(plain.item(), rel=3e-6)  # a difference of sums in one of them
    assert bool(computed) == (name in FULL)


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "llama"])
def test_language_models_never_compute_their_logits(family: str, computed: list[torch.Size]) -> None:
    model, batch = language_model(family), ragged_batch(vocabulary=3000, length=16, rows=4)
    model(**batch).loss.backward()
    expected = gradients(model)
    with fit(workload(model), "--chunk-loss"):
        output = model(**batch)
        output.loss.backward()
        assert distance(gradients(model), expected) < 3e-6
        assert computed == []
        assert output.logits.argmax(-1).shape == (4, 16)


def language_model(family: str) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    small = {
        "vocab_size": 3000,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if family == "bert":
        drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return t.BertForMaskedLM(t.BertConfig(**small, **drop)).train()
    if family == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**small, bos_token_id=0, eos_token_id=0)).train()
    if family == "t5":
        sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 3000}
        return t.T5ForConditionalGeneration(t.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).train()
    return gpt2(vocabulary=3000)


@pytest.mark.parametrize("flags", ["--bf16", "--fp16", "--accumulate 2", "--fp16 --accumulate 2 --checkpoint"])
def test_it_works_together_with_the_others(flags: str, computed: list[torch.Size]) -> None:
    model, batch = gpt2(vocabulary=3000), ragged_batch(vocabulary=3000)
    with fit(workload(model), flags) as session:
        model(**batch).loss.backward()
        expected = gradients(model)
        session.switch(f"{flags} --chunk-loss", now=True)
        model(**batch).loss.backward()
    assert distance(gradients(model), expected) < (2e-6 if flags == "--accumulate 2" else 2e-2)
    assert computed == []


def test_a_criterion_in_the_loop_is_tiled_too_even_under_fp16(computed: list[torch.Size]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000))
    inputs, targets = torch.randn(24, 8), torch.randint(0, 3000, (24,))
    F.cross_entropy(model(inputs), targets).backward()
    expected = gradients(model)
    for flags, tolerance in (("--chunk-loss", 2e-6), ("--chunk-loss --fp16", 2e-2)):
        with fit(workload(model), flags):
            F.cross_entropy(model(inputs), targets).backward()
        assert distance(gradients(model), expected) < tolerance
    assert computed == []


def test_the_peak_falls_by_the_logits() -> None:
    load = workload(gpt2(vocabulary=20_000, width=32), **ragged_batch(vocabulary=20_000))
    logits_bytes = 8 * 32 * 20_000 * 4
    as_written, tiled = (measure(load, flags, steps=1).peak_allocated_bytes for flags in ("", "--chunk-loss"))
    assert as_written - tiled > logits_bytes


@pytest.mark.parametrize("name", ["smoothed", "preferred", "an entropy", "TRL's"])
def test_the_peak_of_other_losses_falls_as_predicted(name: str) -> None:
    model = Head(ROWS[name])
    _, targets = head_batch()
    load = Workload(
        model, torch.optim.SGD(model.parameters(), 0.1), batch=(torch.randn(4, 600, 8), targets.repeat(1, 100))
    )
    peaks = {flags: measure(load, flags, steps=1).peak_allocated_bytes for flags in ("", "--chunk-loss")}
    assert peaks[""] - peaks["--chunk-loss"] > 4 * 600 * 3000 * 4
    assert peaks["--chunk-loss"] == predict(load, "--chunk-loss").peak_allocated_bytes


def test_log_probabilities_are_those_of_the_autocast_they_were_taken_under() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000))
    inputs, targets = torch.randn(2, 6, 8), torch.randint(0, 3000, (2, 6))

    def loss(is_within: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs)
            found = logits.log_softmax(-1) if is_within else logits
        return -chosen(found if is_within else found.log_softmax(-1), targets).mean()

    for is_within in (True, False):
        plain = loss(is_within)
        plain.backward()
        expected = gradients(model)
        model.zero_grad()
        with fit(workload(model), "--chunk-loss"):
            tiled = loss(is_within)
            tiled.backward()
        assert tiled.dtype is plain.dtype
        assert tiled.item() == plain.item()
        assert distance(gradients(model), expected) < 1e-2
        model.zero_grad()


class _Halved(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) / 2


@pytest.mark.parametrize("is_patched", [False, True])
def test_a_head_with_a_forward_of_its_own_is_refused(is_patched: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3000) if is_patched else _Halved(8, 3000))
    if is_patched:
        model[1].forward = lambda hidden: F.linear(hidden, model[1].weight) / 2
    with pytest.raises(RefusalError) as caught:
        fit(Workload(model, torch.optim.AdamW(model.parameters())), "--chunk-loss")
    assert str(caught.value) == (
        f"loss: the layer of Sequential onto 3000 classes, a {'Linear' if is_patched else '_Halved'}, has a forward of its own; "
        "use --accumulate N, which divides the logits as well"
    )


@pytest.mark.parametrize("flags", ["--chunk-loss", "--chunk-loss --offload optimizer", "--chunk-loss --release-grads"])
@pytest.mark.parametrize("is_listed", [False, True])
def test_logits_that_are_read_after_the_step_are_those_of_the_forward(flags: str, is_listed: bool) -> None:
    def trained(flags: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000))
        load = Workload(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        seen, kept = [], []
        with fit(load, flags):
            for _ in range(3):
                load.optimizers[0].zero_grad()
                logits = model(torch.ones(4, 8))
                F.cross_entropy(logits, torch.arange(4)).backward()
                load.optimizers[0].step()
                if is_listed:
                    kept.append(logits[1:])
                else:
                    seen.append(logits.detach().clone())
            seen += [each.detach() for each in kept]
        return seen

    assert distance(trained(flags), trained("")) < 1e-5


@pytest.mark.parametrize("flags", ["--chunk-loss", "--chunk-loss --offload optimizer", "--chunk-loss --release-grads"])
def test_logits_that_the_loop_uses_for_its_loss_alone_are_not_computed(flags: str, computed: list[torch.Size]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000))
    load = Workload(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    with fit(load, flags):
        for _ in range(3):
            load.optimizers[0].zero_grad()
            logits = model(torch.ones(4, 8))
            flat = logits.view(-1, 3000)
            F.cross_entropy(flat, torch.arange(4)).backward()
            load.optimizers[0].step()
    assert computed == []


class _Metric:
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


def _in_a_list(logits: torch.Tensor, metrics: Any) -> None:
    metrics["train"]["rows"].kept.append(logits)


def _as_a_view(logits: torch.Tensor, metrics: Any) -> None:
    metrics["train"]["rows"].kept.append(logits.float())


def _in_an_output(logits: torch.Tensor, metrics: Any) -> None:
    metrics["train"]["rows"].kept.append((logits,))


@pytest.mark.parametrize("keep", [_in_a_list, _as_a_view, _in_an_output])
def test_logits_that_something_else_keeps_beside_a_variable_are_computed_before_the_step(keep: Any) -> None:
    def trained(flags: str) -> torch.Tensor:
        torch.manual_seed(0)
        model, metrics = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000)), {"train": {"rows": _Metric()}}
        load = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with fit(load, flags):
            for _ in range(2):
                logits = model(torch.ones(4, 8))
                F.cross_entropy(logits, torch.arange(4)).backward()
                keep(logits, metrics)
                load.optimizers[0].step()
        kept = metrics["train"]["rows"].kept
        return torch.stack([each[0] if isinstance(each, tuple) else each for each in kept]).detach()

    assert distance([trained("--chunk-loss")], [trained("")]) < 1e-5


def test_logits_that_are_an_argument_of_what_steps_are_those_of_the_forward() -> None:
    """Since Python 3.14 an argument has no reference of its own, and counts for none."""

    def trained(flags: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, metrics = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000)), {"train": {"rows": _Metric()}}
        load = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def stepped(_outputs: torch.Tensor) -> None:
            load.optimizers[0].step()

        with fit(load, flags):
            for _ in range(2):
                logits = model(torch.ones(4, 8))
                F.cross_entropy(logits, torch.arange(4)).backward()
                _in_a_list(logits, metrics)
                stepped(logits)
        return [each.detach() for each in metrics["train"]["rows"].kept]

    assert distance(trained("--chunk-loss"), trained("")) < 1e-5


@pytest.mark.parametrize(
    "reading", ["(logits, criterion.loss)", "logits + 0", "(logits, criterion[0])", "[criterion.loss, logits]"]
)
def test_logits_that_are_read_beside_what_looks_like_a_loss_are_those_of_the_forward(reading: str) -> None:
    def trained(flags: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000))
        load = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1))
        world: dict[str, Any] = {"F": F, "torch": torch}
        loop = "logits = model(torch.ones(4, 8))\n    F.cross_entropy(logits, torch.arange(4)).backward()\n    optimizer.step()"
        exec(f"def step(model, optimizer, criterion):\n    {loop}\n    return {reading}", world)
        with fit(load, flags):
            found = world["step"](model, load.optimizers[0], _Criterion())
            read = found if isinstance(found, torch.Tensor) else next(e for e in found if isinstance(e, torch.Tensor))
            return read.detach() + 0

    assert distance([trained("--chunk-loss")], [trained("")]) < 1e-5


class _Criterion:
    loss = 0.0

    def __getitem__(self, place: int) -> float:
        return self.loss


@pytest.mark.parametrize(
    "reader",
    [
        "def read(): return logits.mean().item()",
        "@torch.no_grad()\ndef read(): return logits.mean().item()",
        "class Log:\n    @staticmethod\n    def read(): return [each.mean().item() for each in [logits]][0]\nread = Log.read",
    ],
)
def test_logits_that_a_function_of_an_earlier_cell_reads_are_those_of_the_forward(reader: str) -> None:
    def trained(flags: str) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000))
        load = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1))
        world: dict[str, Any] = {"load": load, "model": model, "cross_entropy": F.cross_entropy, "torch": torch}
        exec(reader, world)
        with fit(load, flags):
            exec(f"{_STEP}\nseen = read()", world)
        return float(world["seen"])

    assert trained("--chunk-loss") == pytest.approx(trained(""), rel=1e-5)


def test_code_is_looked_through_once_and_not_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long function it takes 100 ms."""
    looked, counts, original = [], [], dis.get_instructions
    monkeypatch.setattr(dis, "get_instructions", lambda code: looked.append(code) or original(code))
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000))
    load = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with fit(load, "--chunk-loss"):
        for _ in range(3):
            logits = model(torch.ones(4, 8))
            F.cross_entropy(logits, torch.arange(4)).backward()
            load.optimizers[0].step()
            counts.append(len(looked))
    assert counts[0] > 0
    assert len({*counts}) == 1


_STEP = "logits = model(torch.ones(4, 8))\ncross_entropy(logits, torch.arange(4)).backward()\nload.optimizers[0].step()"


@pytest.mark.parametrize("read", ["logits.sum()", "cross_entropy(logits, torch.arange(4))", "logits.float()"])
def test_logits_that_a_variable_holds_too_long_say_so(read: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000))
    load = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1))
    world: dict[str, Any] = {"load": load, "model": model, "cross_entropy": F.cross_entropy, "torch": torch}
    with fit(load, "--chunk-loss"):
        exec("def evaluated():\n    logits = model(torch.ones(4, 8))\n    return logits.mean()", world)
        exec(_STEP, world)
        with pytest.raises(SessionError, match=r"logits of a chunked loss were read after optimizer.step\(\)"):
            exec(read, world)


def test_what_is_written_to_a_view_of_the_logits_is_seen_in_them() -> None:
    def loss(logits: Any, target: Any) -> Any:
        flat = logits.view(-1, 3000)
        flat[:, 7] = -1e4
        logits.mul_(0.5)
        return F.cross_entropy(logits.flatten(0, 1), target.view(-1)) + F.cross_entropy(flat, target.view(-1))

    inputs, targets = head_batch()
    model = Head(loss)
    expected = model(inputs, targets)
    with fit(workload(model), "--chunk-loss"):
        assert float(model(inputs, targets)) == pytest.approx(float(expected))


def test_evaluation_gets_plain_logits() -> None:
    model, batch = gpt2(), ragged_batch()
    with fit(workload(model), "--chunk-loss"):
        with torch.no_grad():
            assert type(model(**batch).logits) is torch.Tensor
        assert type(model.eval()(**batch).logits) is torch.Tensor
        assert isinstance(model.train()(**batch).logits, DeferredLogits)


class Halved(torch.autograd.Function):
    """Half of the gradient."""

    @staticmethod
    def forward(_context: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.clone()

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] / 2


@torch.jit.script
def scripted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits * 0.5, targets)


PAST_PYTHON: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "function": lambda logits, targets: F.cross_entropy(Halved.apply(logits), targets),  # type: ignore[no-untyped-call]
    "script": scripted,
    "checkpoint": lambda *given: checkpoint(F.nll_loss, *given, use_reentrant=True),
    "checkpoint, not reentrant": lambda *given: checkpoint(
        lambda x, y: F.nll_loss(x * 2, y), *given, use_reentrant=False
    ),
    "vmap": lambda logits, targets: torch.vmap(F.cross_entropy)(logits, targets).mean(),
}


class Judging(nn.Module):
    """Logits, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3000)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(inputs))
        return F.cross_entropy(logits, targets), logits


@pytest.mark.parametrize("way", PAST_PYTHON)
@pytest.mark.parametrize("flags", ["--chunk-loss", "--accumulate 2", "--fp16 --accumulate 2"])
def test_a_loss_that_takes_logits_past_python(flags: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_outputs, "LAZY_FROM_BYTES", 0)
    torch.manual_seed(0)
    inputs, targets = torch.randn(4, 8), torch.randint(3000, (4,))
    found = []
    for plan in ("", flags):
        model = Judging()
        with fit(Workload(model, torch.optim.SGD(model.parameters())), plan):
            loss, _ = model(inputs, targets)  # a first call tells that logits need not be kept
            loss.backward()
            model.zero_grad()
            loss, logits = model(inputs, targets)
            assert (type(logits) is torch.Tensor) is (plan == "")
            (loss + PAST_PYTHON[way](logits, targets.flip(0))).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    is_low = "fp16" in flags
    torch.testing.assert_close(found[1], found[0], rtol=0.02 if is_low else 1e-4, atol=1e-3 if is_low else 1e-6)


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    model, batch = gpt2(), ragged_batch()
    passes: list[list[torch.Tensor]] = []
    for flags in ("", "--chunk-loss"):
        with fit(workload(model), flags):
            loss = model(**batch).loss
            parameters = list(model.parameters())
            passes += [
                list(torch.autograd.grad(loss, parameters, torch.tensor(3.0), retain_graph=keep))
                for keep in (True, False)
            ]
            with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
                loss.backward()
    for made in passes[1:]:
        torch.testing.assert_close(made, passes[0], rtol=1e-4, atol=1e-6)


def test_gradients_of_gradients() -> None:
    slopes = []
    inputs, targets = head_batch()
    for flags in ("", "--chunk-loss"):
        model = Head(lambda logits, target: F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1)))
        with fit(workload(model), flags):
            gradients = torch.autograd.grad(model(inputs, targets), list(model.parameters()), create_graph=True)
            sum(gradient.square().sum() for gradient in gradients).backward()  # type: ignore[union-attr]
        slopes.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss, F.kl_div])
def test_a_reduction_that_torch_does_not_know_is_its_error(loss: Any) -> None:
    model, inputs = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000)), torch.randn(6, 8)
    target = torch.rand(6, 3000) if loss is F.kl_div else torch.randint(0, 3000, (6,))
    with fit(workload(model), "--chunk-loss"), pytest.raises(ValueError, match="not a valid value for reduction"):
        loss(model(inputs).log_softmax(-1), target, reduction="median")


def test_a_model_without_a_large_head_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 100))
    with pytest.raises(RefusalError) as caught:
        fit(Workload(model, torch.optim.AdamW(model.parameters())), "--chunk-loss")
    assert str(caught.value) == (
        "loss: Sequential has no linear layer onto 2048 or more classes; "
        "use --accumulate N, which divides the logits as well"
    )


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_loss_that_is_not_computed_in_tiles_is_said(is_whole: bool) -> None:
    model = nn.Sequential(nn.Embedding(2048, 8), nn.Linear(8, 2048))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.randint(0, 2048, (16,))
    with fit(Workload(model, optimizer), "--chunk-loss") as session:
        logits = model(rows)
        F.cross_entropy(logits * torch.ones(2048) if is_whole else logits, rows).backward()
        optimizer.step()
        assert any("--chunk-loss had no effect" in note for note in session.notes) is is_whole


@pytest.mark.few(1)
def test_a_compiled_function_whose_batch_is_marked_dynamic_goes_on() -> None:
    import torch._dynamo

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 4096, bias=False)

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(inputs), targets)

    def trained(plan: str) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(lambda *batch: model(*batch), backend="aot_eager")
        losses = []
        with fit(Workload(model, optimizer), plan):
            for rows in (8, 9, 10):
                batch = torch.randn(rows, 16), torch.randint(0, 4096, (rows,))
                for tensor in batch:
                    torch._dynamo.mark_dynamic(tensor, 0)
                optimizer.zero_grad()
                loss = compiled(*batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    assert trained("--chunk-loss") == pytest.approx(trained(""), rel=1e-6)


def test_pure_bf16_never_has_the_logits_in_memory() -> None:
    model = gpt2(vocabulary=4000)
    ids = torch.randint(0, 4000, (32, 16), generator=torch.Generator().manual_seed(0))
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch={"input_ids": ids, "labels": ids})
    whole, tiles = (
        measure(workload, f"--precision pure-bf16{chunked}").peak_allocated_bytes for chunked in ("", " --chunk-loss")
    )
    logits_bytes = 4 * ids.numel() * 4000
    assert whole - tiles >= 2 * logits_bytes
    assert predict(workload, "--precision pure-bf16 --chunk-loss").peak_allocated_bytes == tiles


def test_a_loss_of_pure_bf16_is_refused_once_weights_are_whole_again() -> None:
    model = gpt2(vocabulary=4000)
    ids = torch.randint(0, 4000, (4, 16), generator=torch.Generator().manual_seed(0))
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--precision pure-bf16 --chunk-loss"):
        loss = model(input_ids=ids, labels=ids).loss
    with pytest.raises(
        RefusalError, match=r"^precision: this was computed with weights in pure bf16, which was taken off"
    ):
        loss.backward()
