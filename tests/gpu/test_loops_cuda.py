"""The loops of `tests/loops` on a GPU: what they compute under a plan is what they compute without it."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memlab import Workload, fit
from tests.loops import tolerances
from tests.loops.cases import CASES
from tests.loops.running import deviation, everything_for, plain_loop, plans_for
from tests.loops.test_handwritten import HALF, LOOPS, PLANS, _without_fingerprint, scaled, traces

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

STEPS = 6
_EVERYTHING = "--accumulate 3 --checkpoint --offload activations,optimizer,params"
_EACH = [(name, plan) for name, case in CASES.items() for plan in (*plans_for(case), everything_for(case))]
_LOSSY = [(name, plan) for plan, by_name in tolerances.LOSSY.items() for name in by_name]


@pytest.mark.few
@pytest.mark.parametrize("plan", [*PLANS, _EVERYTHING])
@pytest.mark.parametrize("name", ["tied", "tied-criterion"])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_under_every_plan(loop: str, name: str, plan: str) -> None:
    case = CASES[name].on("cuda")
    if loop == "scheduling":
        found, expected = _without_fingerprint(case, LOOPS[loop], plan)
    else:
        found, expected = traces(case, LOOPS[loop], plan, STEPS)
    assert deviation(found, expected) <= tolerances.LOSS


@pytest.mark.few(30)
@pytest.mark.parametrize(("name", "plan"), _EACH)
def test_every_model_under_every_plan(name: str, plan: str) -> None:
    found, expected = traces(CASES[name].on("cuda"), plain_loop, plan, STEPS)
    assert deviation(found, expected) <= tolerances.LOSS


@pytest.mark.few
@pytest.mark.parametrize(("name", "plan"), _LOSSY)
def test_what_rounds_stays_near(name: str, plan: str) -> None:
    case = CASES[name].on("cuda")
    found, expected = traces(case, plain_loop, plan, STEPS, exact=False)
    if "fp16" in plan:  # which skips steps while its scale is found, as a loop's own scaler does
        model = case.model()
        expected = scaled(torch.float16, device="cuda")(model, case.optimizer(model), case, STEPS)[::2]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= tolerances.LOSSY[plan][name] * expected[0]


@pytest.mark.few
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["tied", "tied-criterion"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_grad_scaler_in_the_loop(dtype: torch.dtype, name: str, plan: str) -> None:
    loop = scaled(dtype, clips=True, enabled=dtype is torch.float16, device="cuda")
    found, expected = traces(CASES[name].on("cuda"), loop, plan, STEPS)
    assert deviation(found, expected) <= HALF[dtype]


class _LanguageModel(torch.nn.Module):
    """A model with a loss over those targets that are not ignored, and calls that never wait for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = torch.nn.Embedding(64, 16), torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0)
        self.head = torch.nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(self.embedding(tokens).transpose(0, 1)).transpose(0, 1))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize(("plan", "most"), [("--accumulate 4", 1), ("--accumulate 4 --checkpoint --bf16 --adam8bit", 1),
                                            ("--checkpoint --offload activations,optimizer", 0)])  # fmt: skip
def test_a_step_seldom_has_the_host_wait_for_the_gpu(plan: str, most: int) -> None:
    """A host that waits launches nothing meanwhile, and small kernels take no longer than their launches."""
    model = _LanguageModel().cuda().train()
    tokens = torch.randint(0, 64, (8, 6), device="cuda")
    labels = tokens.masked_fill(tokens % 5 == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(tokens, labels)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    with fit(Workload(model, optimizer), plan), warnings.catch_warnings(record=True) as waits:
        for _ in range(3):
            step()
        warnings.simplefilter("always")
        waits.clear()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    said = [str(each.message) for each in waits if "synchronizing CUDA operation" in str(each.message)]
    assert len(said) <= most


@pytest.mark.parametrize("plan", ["--pack", "--pack --checkpoint --offload optimizer,activations"])
def test_padded_batches_train_as_they_do_with_their_padding(plan: str) -> None:
    losses = {}
    for flags in ("", plan):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).cuda().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with fit(Workload(model, optimizer), flags) as session:
            for step in range(3):
                lengths = torch.tensor([24, 5, 9 + step, 13], device="cuda")[:, None]
                mask = (torch.arange(24, device="cuda") < lengths).long()
                words = torch.randint(1, 97, (4, 24), device="cuda") * mask
                loss = model(input_ids=words, attention_mask=mask, labels=words.masked_fill(mask == 0, -100)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.setdefault(flags, []).append(loss.item())
            if flags:
                assert any("53 of 96 positions" in note for note in session.notes)
    assert losses[plan] == pytest.approx(losses[""], rel=1e-5)
