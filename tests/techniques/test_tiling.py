"""Large linear layers in tiles: exact, smaller, and gone without a trace."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import RefusalError, Workload, fit, measure, predict
from memlab.session.snapshot import Snapshot
from memlab.techniques.tiling import tiling
from memlab.techniques.tiling.feed_forward import feed_forwards
from memlab.techniques.tiling.tiling import TiledLinear
from tests.helpers.snapshots import changed_between
from tests.techniques.models import distance, gpt2, gradients, ragged_batch, workload

PLANS = [
    "--tile 2",
    "--tile 4",
    "--tile 3 --checkpoint",
    "--tile 3 --checkpoint selective",
    "--tile 3 --checkpoint budget:1MiB",
    "--tile 4 --accumulate 2",
    "--tile 4 --accumulate 4 --checkpoint --chunk-loss",
    "--tile 4 --offload activations",
]


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "LARGE_BYTES", 1)


def after_a_backward(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(3)
    output = model(**batch)
    loss = output.loss if hasattr(output, "loss") else output
    loss.backward()
    return loss.item(), gradients(model)


class Gated(nn.Module):
    """The form of Llama: two layers onto the wide result."""

    def __init__(self, width: int, wide: int, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, wide, bias=bias) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Adapted(nn.Module):
    """A linear layer behind a low-rank adapter, as peft wraps it: the layer itself is frozen."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.b(self.a(hidden))


class Residual(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            hidden = hidden + part(hidden)
        return hidden.square().mean()


def gated(bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Residual(Gated(16, 64, bias), Gated(16, 48, bias))


def adapted() -> nn.Module:
    torch.manual_seed(0)
    part = Gated(32, 128)
    part.up, part.down = Adapted(part.up), Adapted(part.down)
    return Residual(part)


def partly_frozen() -> nn.Module:
    model = gated()
    model.parts[0].requires_grad_(False)
    model.parts[1].up.requires_grad_(False)
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(
        BertConfig(**sizes, vocab_size=2048, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ).train()


def torchs_encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True)
    return Residual(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


_HIDDEN = {"hidden": torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(1))}
FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor], int]] = {
    "gpt2": (lambda: gpt2(layers=2), ragged_batch(), 2),
    "bert": (bert, ragged_batch(vocabulary=2048), 2),
    "gated": (gated, _HIDDEN, 2),
    "gated with bias": (lambda: gated(bias=True), _HIDDEN, 2),
    "partly frozen": (partly_frozen, _HIDDEN, 2),
    "adapted": (adapted, {"hidden": torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(1))}, 1),
    "torch's encoder": (torchs_encoder, _HIDDEN, 2),
}


@pytest.mark.few(6)
@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("tiles", [2, 5, 100])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_without_tiles(name: str, tiles: int) -> None:
    build, batch, parts = FAMILIES[name]
    model = build()
    loss, expected = after_a_backward(model, batch)
    with fit(workload(model), f"--tile {tiles}") as session:
        found = after_a_backward(model, batch)
        assert session.notes == (f"in {tiles} tiles: {parts} feed-forward parts over rows",)
    assert abs(found[0] / loss - 1) < 1e-6
    assert distance(found[1], expected) < 1e-6


@pytest.mark.usefixtures("small_is_large")
def test_a_batch_without_rows() -> None:
    model = gated()
    with fit(workload(model), "--tile 2"):
        for rows in (4, 0):
            model(torch.zeros(rows, 16)).backward()


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("flags", PLANS)
def test_tiles_beside_other_techniques(flags: str) -> None:
    model, batch = gpt2(layers=3), ragged_batch()
    loss, expected = after_a_backward(model, batch)
    with fit(workload(model), flags):
        for _ in range(2):
            found = after_a_backward(model, batch)
            assert abs(found[0] / loss - 1) < 1e-6
            assert distance(found[1], expected) < 1e-6


@pytest.mark.few(1)
@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("rescue", [False, True])
@pytest.mark.parametrize("flags", ["--tile 4", "--tile 4 --accumulate 2", "--tile 4 --release-grads"])
def test_thirty_steps(flags: str, rescue: bool) -> None:
    runs = []
    for plan in ("", flags):
        model = gpt2(layers=2, width=32, vocabulary=256)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        with fit(Workload(model, optimizer), plan, rescue=rescue and bool(plan)):
            for step in range(30):
                generator = torch.Generator().manual_seed(step)
                ids = torch.randint(0, 256, (4, 12), generator=generator)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        runs.append(losses)
    assert max(abs(a / b - 1) for a, b in zip(*runs, strict=True)) < 1e-4


@pytest.mark.usefixtures("small_is_large")
def test_under_autocast_large_layers_are_cast_a_tile_at_a_time() -> None:
    model, batch = gpt2(layers=2), ragged_batch()
    _, exact = after_a_backward(model, batch)
    with fit(workload(model), "--bf16"):
        _, cast = after_a_backward(model, batch)
    with fit(workload(model), "--bf16 --tile 4") as session:
        _, tiled = after_a_backward(model, batch)
        assert session.notes == ("in 4 tiles: 2 feed-forward parts over rows and 5 linear layers over output features",)
    assert distance(tiled, exact) < 1.5 * distance(cast, exact)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_layer_in_tiles_of_features_is_the_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((3, 5, 8), (10, 8), (10,)))
    for leaf in (inputs, weight, bias):
        leaf.requires_grad_()
    plain = F.linear(inputs, weight, bias)
    given = torch.randn(plain.shape, generator=generator)
    expected = torch.autograd.grad(plain, (inputs, weight, bias), given)
    for tiles in (1, 3, 99):
        tiled = TiledLinear.apply(inputs, weight, bias, tiles)
        torch.testing.assert_close(tiled, plain, rtol=1e-6, atol=1e-6)
        for found, true in zip(torch.autograd.grad(tiled, (inputs, weight, bias), given), expected, strict=True):
            torch.testing.assert_close(found, true, rtol=1e-6, atol=1e-5)


@pytest.mark.usefixtures("small_is_large")
def test_a_gradient_of_a_gradient() -> None:
    torch.manual_seed(0)
    rows, weight, bias = (torch.randn(*size, requires_grad=True) for size in ((8, 16), (32, 16), (32,)))
    slopes = []
    for layer in (nn.functional.linear, lambda *given: tiling.TiledLinear.apply(*given, 2)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(rows.to(torch.bfloat16), weight, bias).float().square().mean()
        gradients = torch.autograd.grad(loss, (rows, weight, bias), create_graph=True)
        slopes.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), (rows, weight, bias)))
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(one.abs().max()))


def wide(blocks: int = 2) -> Workload:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(128, 2048), nn.GELU(), nn.Linear(2048, 128)) for _ in range(blocks))
    model = Residual(*parts)
    return Workload(model, torch.optim.AdamW(model.parameters()), batch={"hidden": torch.randn(2048, 128)})


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", ["--tile 4", "--tile 4 --checkpoint", "--bf16 --tile 4", "--tile 2 --accumulate 2"])
def test_predictions_are_exact_on_the_ledger(flags: str) -> None:
    load = wide()
    predicted, found = predict(load, flags), measure(load, flags, steps=1)
    assert abs(predicted.peak_allocated_bytes / found.peak_allocated_bytes - 1) < 0.002


def test_the_wide_result_never_exists_whole() -> None:
    load = wide()
    as_written, tiled = (measure(load, flags, steps=1).peak_allocated_bytes for flags in ("", "--tile 8"))
    intermediate = 2048 * 2048 * 4
    # two blocks keep what goes into the activation and what comes out of it; a tile holds an eighth of a few of these
    assert as_written - tiled > 3 * intermediate


@pytest.mark.usefixtures("small_is_large")
def test_hooks_of_layers_are_called_once_and_nothing_stays() -> None:
    model, batch = gpt2(), ragged_batch()
    load = workload(model)
    calls: list[int] = []
    handle = model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_: calls.append(1))
    before = Snapshot(load)
    with fit(load, "--tile 2") as session:
        model(**batch).loss.backward()
        assert calls == [1]  # a hook that keeps state sees its part whole
        assert session.notes == (
            "in 2 tiles: 1 feed-forward parts over rows; 1 that mix rows, keep state or have hooks stay whole",
        )
        session.switch("--tile 4 --checkpoint", now=True)
        session.switch("--checkpoint", now=True)
        session.switch("--tile 4", now=True)
        copied = deepcopy(model)
        model.eval()(**batch)
        with torch.no_grad():
            model.train()(**batch)
    handle.remove()
    model.zero_grad()
    assert changed_between(before, Snapshot(load)) == []
    assert not any({"forward", "feed_forward_chunk"} & set(vars(module)) for module in model.modules())
    assert torch.equal(copied.train()(**batch).loss, model(**batch).loss)


@pytest.mark.usefixtures("small_is_large")
def test_a_part_that_is_a_block_is_tiled_under_checkpointing_and_after_it() -> None:
    parts = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))
    torch.manual_seed(0)
    model = Residual(*parts)
    batch = {"hidden": torch.randn(6, 8)}
    _, expected = after_a_backward(model, batch)
    with fit(workload(model)) as session:
        for flags in ("--checkpoint", "--checkpoint --tile 2", "--checkpoint --tile 4", "--tile 4", ""):
            session.switch(flags, now=True)
            assert distance(after_a_backward(model, batch)[1], expected) < 1e-6
    assert not any("forward" in vars(module) for module in model.modules())


class Mixing(nn.Module):
    """Looks like a feed-forward part, and is attention over a wider space."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 32) for _ in range(3))
        self.out = nn.Linear(32, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = (self.query(hidden) @ self.key(hidden).transpose(-1, -2)).softmax(-1)
        return self.out(weights @ self.value(hidden))


@pytest.mark.usefixtures("small_is_large")
def test_what_mixes_rows_stays_whole() -> None:
    torch.manual_seed(0)
    model = Residual(Mixing(), Gated(8, 32)).double()
    assert len(feed_forwards(model)) == 2
    batch = {"hidden": torch.randn(2, 6, 8, dtype=torch.float64)}
    _, expected = after_a_backward(model, batch)
    with fit(workload(model), "--tile 2") as session:
        assert distance(after_a_backward(model, batch)[1], expected) < 1e-6
        assert session.notes == (
            "in 2 tiles: 1 feed-forward parts over rows; 1 that mix rows, keep state or have hooks stay whole",
        )


class _Centred(nn.Module):
    """A feed-forward part that subtracts a mean of the batch, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            hidden = hidden - hidden.mean(0, keepdim=True)
        return self.dropout(self.down(F.gelu(self.up(hidden))))


@pytest.mark.usefixtures("small_is_large")
def test_what_mixes_rows_in_training_alone_stays_whole() -> None:
    torch.manual_seed(0)
    model = Residual(_Centred(), Gated(8, 32))
    seen: list[torch.Size] = []
    model.parts[1].up.register_forward_hook(lambda _m, _i, output: seen.append(output.shape))
    random = torch.get_rng_state()
    batch = {"hidden": torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))}
    _, expected = after_a_backward(model, batch)
    torch.set_rng_state(random)
    with fit(workload(model), "--tile 2") as session:
        assert distance(after_a_backward(model, batch)[1], expected) < 1e-6
        assert session.notes == (
            "nothing is computed in tiles: feed-forward parts, 2 that mix rows, keep state or have hooks stay whole",
        )
    assert seen == [(2, 6, 32)] * 2  # a hook of the loop sees its layer whole


def test_layers_with_computed_weights_are_left_alone() -> None:
    part = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.utils.parametrizations.weight_norm(nn.Linear(32, 8)))
    assert feed_forwards(Residual(part)) == []

    class Quantised(nn.Linear):
        """Stands for a subclass whose weight is packed."""

    assert feed_forwards(Residual(nn.Sequential(nn.Linear(8, 32), nn.GELU(), Quantised(32, 8)))) == []


def _refusal(model: nn.Module, flags: str) -> str:
    with pytest.raises(RefusalError) as caught:
        fit(workload(model), flags)
    return str(caught.value)


def test_models_without_large_layers_are_refused() -> None:
    assert _refusal(gpt2(vocabulary=64), "--tile 4") == (
        "tiling: no linear layer of GPT2LMHeadModel has a weight of 1.0 MiB or more: the largest takes 64.0 KiB; "
        "use --accumulate N or --checkpoint, which lower what layers keep"
    )
    assert "it has none at all" in _refusal(nn.Sequential(nn.Conv2d(3, 4, 3)), "--tile 4")
    # a head is spoken of where there is one
    for classes, beside in ((16, ""), (4096, " beside the head, whose loss is chunked,")):
        assert f"of Sequential{beside} has a weight" in _refusal(
            nn.Sequential(nn.Linear(8, classes)), "--tile 2 --chunk-loss"
        )


def test_scripted_models_are_refused() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))  # type: ignore[no-untyped-call] # unannotated
    assert "it has none at all" in _refusal(scripted, "--tile 2")


def test_large_layers_alone_need_autocast() -> None:
    layers = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    assert _refusal(layers, "--tile 4 --precision pure-bf16") == (
        "tiling: Sequential has no feed-forward part to tile over rows, and tiles save copies of its large "
        "layers only under autocast; use it with --bf16 or --fp16, or --accumulate N instead"
    )
    load: Any = workload(layers)
    with fit(load, "--tile 4") as session:
        layers(torch.randn(2, 512)).sum().backward()
        assert session.notes == (
            "nothing is computed in tiles: without autocast large layers make no copies that tiles could save",
        )
    with fit(load, "--tile 4") as session, torch.autocast("cpu", torch.bfloat16):
        layers(torch.randn(2, 512)).sum().backward()
        assert session.notes == ("in 4 tiles: 2 linear layers over output features",)
