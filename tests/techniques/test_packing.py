"""Batches without their padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from memlab import Plan, PlanError, RefusalError, Workload, fit, measure
from memlab.predicting import predict_all
from memlab.records import Prediction
from memlab.runtime.lazy import LazyTensor
from memlab.runtime.observer import Observer
from memlab.session import Session, session_of
from memlab.techniques.accumulation.judge import Judge

_LENGTHS = (5, 12, 3, 9)
_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
_GQA = {**_SIZES, "num_key_value_heads": 2}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_LEAVE_OUT = "; leave --pack out, and group samples of like length in the loader"
Loop = Callable[[nn.Module, dict[str, Any]], torch.Tensor]


def llama(attention: str = "sdpa", **sizes: int) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**_GQA, **sizes}, attn_implementation=attention))


def gpt2(attention: str = "sdpa", **dropout: float) -> nn.Module:
    config = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**config, **{**_NO_DROPOUT, **dropout}, attn_implementation=attention))


def qwen2(attention: str) -> nn.Module:
    return Qwen2ForCausalLM(Qwen2Config(**_GQA, attn_implementation=attention))


def mistral(attention: str) -> nn.Module:
    return MistralForCausalLM(MistralConfig(**_GQA, sliding_window=6, attn_implementation=attention))


def batch(lengths: tuple[int, ...] = _LENGTHS, *, words: int = 64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, words, (len(lengths), max(lengths)), generator=generator)  # [b, s]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def from_the_left(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.flip(1) for name, value in given.items()}


def of_model(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    return model(**given).loss


def of_loop(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    labels = given.pop("labels")
    logits = model(**given).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def of_both(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    output = model(**given)
    return output.loss + 0.1 * output.logits[given["attention_mask"] == 1].square().mean()


def of_all_positions(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    del given["labels"]
    return model(**given).logits.square().mean()


def made(make: Callable[..., nn.Module], *given: Any, **sizes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make(*given, **sizes).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(
    plan: str, loop: Loop = of_model, steps: int = 3, *, asks: str = "", rescue: bool = False, words: int = 64
) -> tuple[list[float], list[str], Session]:
    """Losses of a small Llama, and what was said of the last step; a plan that is clicked comes with the second one."""
    model, optimizer = made(llama, vocab_size=words)
    losses = []
    with fit(Workload(model, optimizer), plan, [Observer()], rescue=rescue) as session:
        for step in range(steps):
            if step == 1 and asks:
                session.switching.ask(Plan.parse(asks))
            loss = loop(model, batch(words=words))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, notes(session), session
    raise AssertionError


def notes(session: Session) -> list[str]:
    return [note for technique in session.techniques for note in technique.notes]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llama, gpt2, qwen2, mistral])
def test_loss_outputs_and_gradients_are_those_of_the_padded_batch(
    make: Callable[..., nn.Module], attention: str
) -> None:
    model, optimizer = made(make, attention)
    expected = model(**batch())
    expected.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad()
    before = torch.get_rng_state()

    with fit(Workload(model, optimizer), "--pack") as session:
        output = model(**batch())
        output.loss.backward()
        assert notes(session) == ["rows one after another: 29 of 48 positions of the last batch"]

    is_kept = batch()["attention_mask"] == 1
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.logits[is_kept], expected.logits[is_kept], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients, rtol=1e-4, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("loop", [of_model, of_loop, of_both])
@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        ("", 1e-6),
        ("--checkpoint", 1e-6),
        ("--offload activations", 1e-6),
        ("--release-grads", 1e-6),
        ("--lora", 1e-6),
        ("--bf16", 1e-3),
        ("--precision pure-bf16", 1e-3),
    ],
)
def test_losses_are_those_of_the_plan_without_it(plan: str, tolerance: float, loop: Loop) -> None:
    expected, *_ = trained(plan, loop)

    losses, *_ = trained(f"{plan} --pack", loop)

    assert losses == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("loop", [of_model, of_loop])
def test_logits_that_are_not_computed_stay_so(loop: Loop) -> None:
    words = 2048
    expected, *_ = trained("", loop, words=words)
    peaks = []
    for plan in ("--pack", "--pack --chunk-loss"):
        losses, *_ = trained(plan, loop, words=words)
        assert losses == pytest.approx(expected, rel=1e-6)
        model, optimizer = made(llama, vocab_size=words)
        load = Workload(model, optimizer, batch=batch((40, 90, 50), words=words))
        peaks.append(measure(load, plan, steps=1).peak_allocated_bytes)
    # 180 positions in fp32, twice
    assert peaks[0] - peaks[1] > 180 * words * 4


def test_outputs_come_back_in_rows() -> None:
    model, optimizer = made(llama)
    shapes = [tuple(each.shape) for each in model(**batch(), output_hidden_states=True).hidden_states]

    with fit(Workload(model, optimizer), "--pack"):
        output = model(**batch(), output_hidden_states=True)
        loss, logits = model(
            batch()["input_ids"], batch()["attention_mask"], labels=batch()["labels"], return_dict=False
        )

    assert [tuple(each.shape) for each in output.hidden_states] == shapes
    assert type(output).__name__ == "CausalLMOutputWithPast"
    assert logits.shape == (4, 12, 64)
    assert loss.shape == ()
    # at padding stand values of other positions, of which nothing is computed
    assert logits.isfinite().all()


def test_outputs_beside_a_loss_are_put_back_when_the_loop_looks() -> None:
    model, optimizer = made(llama)

    with fit(Workload(model, optimizer), "--pack"):
        output = model(**batch())
        output.loss.backward()
        assert isinstance(output.logits, LazyTensor)
        assert output.logits._value is None
        optimizer.step()
    # of the weights that the call found
    with torch.no_grad():
        assert (output.logits[0, :5] - model(**batch()).logits[0, :5]).abs().max() > 1e-4


def test_positions_and_embeddings_that_the_loop_gives_are_packed_as_well() -> None:
    def with_positions(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
        return model(**given, position_ids=torch.arange(12)[None]).loss

    def embedded(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
        return model(inputs_embeds=model.get_input_embeddings()(given.pop("input_ids")), **given).loss

    expected, *_ = trained("")
    for loop in (with_positions, embedded):
        losses, said, _ = trained("--pack", loop)
        assert losses == pytest.approx(expected, rel=1e-6)
        assert said == ["rows one after another: 29 of 48 positions of the last batch"]


def counting_padding(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    return model(**{**given, "labels": given["input_ids"]}).loss


def without_mask(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    return model(input_ids=given["input_ids"], labels=given["labels"]).loss


def with_cache(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    return model(**given, use_cache=True).loss


def with_cache_by_its_newer_name(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    """As Transformers has it since 5.24."""
    return model(**given, cache=DynamicCache()).loss


def with_other_positions(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    return model(**given, position_ids=torch.arange(12)[None] + 3).loss


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (
            lambda model, given: model(**from_the_left(given)).loss,
            "the attention_mask of LlamaForCausalLM has padding before or within rows, not after them, or other values than 0 and 1",
        ),
        (counting_padding, "labels of LlamaForCausalLM count padding, that is, are not -100 there"),
        (
            without_mask,
            "LlamaForCausalLM is called without an attention_mask of rows × positions, which says what is padding",
        ),
        *(
            (loop, "the loop asks LlamaForCausalLM for a key-value cache, in which all rows would be one")
            for loop in (with_cache, with_cache_by_its_newer_name)
        ),
        (
            with_other_positions,
            "the position_ids that LlamaForCausalLM is called with do not count from 0 in each row",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(loop: Loop, reason: str) -> None:
    with pytest.raises(RefusalError) as caught:
        trained("--pack", loop)

    assert str(caught.value) == f"padding: {reason}{_LEAVE_OUT}"


class Counting(nn.Module):
    """A model that keeps the mean of what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.mean = 0.0

    def forward(self, position_ids: torch.Tensor | None = None, **given: Any) -> Any:
        output = self.inner(position_ids=position_ids, **given)
        self.mean = float(output.logits.detach().mean())
        return output


class Buffered(nn.Module):
    """A causal mask of so many positions, as older models hold."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 64)
        self.register_buffer("bias", torch.zeros(12, 64))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        return {"logits": self.words(input_ids) + self.bias[: input_ids.shape[1]]}


_DIFFERS = (
    "{} returns or keeps something else where rows stand one after another: its attention does not keep them apart by position_ids, "
    "its loss does not predict the next position, or what it counts depends on padding"
)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: BertForMaskedLM(
                BertConfig(**_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
            ),
            _DIFFERS.format("BertForMaskedLM"),
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(
                    d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, dropout_rate=0.0,
                    decoder_start_token_id=0,
                )
            ),
            _DIFFERS.format("T5ForConditionalGeneration"),
        ),
        (Counting, _DIFFERS.format("Counting")),
        (
            lambda: MixtralForCausalLM(MixtralConfig(**_GQA, num_local_experts=4)),
            "MixtralForCausalLM chooses by values that it has computed (routed experts): one batch does not tell what others do",
        ),
        (
            lambda: MixtralForCausalLM(MixtralConfig(**_GQA, num_local_experts=4, output_router_logits=True)),
            "MixtralForCausalLM returns output['router_logits'][0] [29, 4], which cannot be put back into rows",
        ),
        (
            Buffered,
            "Buffered does not run where rows stand one after another: RuntimeError: The size of tensor a (29) must match the size of tensor b (12) at "
            "non-singleton dimension 1",
        ),
        (
            lambda: LlamaForSequenceClassification(LlamaConfig(**_GQA, num_labels=64, pad_token_id=0)),
            None,
        ),
    ],
)  # fmt: skip
def test_models_that_padding_is_part_of_are_refused(make: Callable[[], nn.Module], reason: str | None) -> None:
    model, optimizer = made(make)
    given = batch()
    if reason is None:
        given["labels"] = torch.arange(4)
        reason = "the argument['labels'] of LlamaForSequenceClassification is [4], not of 4 rows × 12 positions"
    state = {name: value.clone() for name, value in model.state_dict().items()}

    with fit(Workload(model, optimizer), "--pack"), pytest.raises(RefusalError) as caught:
        model(**given)

    assert str(caught.value) == f"padding: {reason}{_LEAVE_OUT}"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_row_does_not_tell_what_several_do() -> None:
    config = BertConfig(**_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model, optimizer = made(lambda: BertForMaskedLM(config))
    alone = {name: value[3:] for name, value in batch().items() if name != "labels"}
    together = {name: value for name, value in batch().items() if name != "labels"}
    expected = model(**together).logits

    with fit(Workload(model, optimizer), "--pack") as session:
        model(**alone)
        assert notes(session) == ["rows one after another: 9 of 12 positions of the last batch"]
        torch.testing.assert_close(model(**together).logits, expected)
        assert notes(session)[1:] == [f"a batch is run as it is, since {_DIFFERS.format('BertForMaskedLM')}"]


def test_dropout_is_refused_unless_it_is_zero() -> None:
    model, optimizer = made(gpt2, attn_pdrop=0.1)

    with fit(Workload(model, optimizer), "--pack"), pytest.raises(RefusalError) as caught:
        model(**batch())

    assert str(caught.value) == (
        "padding: GPT2LMHeadModel draws random numbers (dropout), one for each position, and would draw others without padding; set "
        "dropout to 0, or leave --pack out"
    )


def test_a_model_without_positions_is_refused_before_it_runs() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(64, 4)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.words(input_ids)

    model, optimizer = made(Bag)

    with pytest.raises(RefusalError) as caught:
        fit(Workload(model, optimizer), "--pack")

    assert str(caught.value) == (
        f"padding: Bag takes no position_ids, by which attention would keep rows apart that stand one after another{_LEAVE_OUT}"
    )


_USED = (
    "padding: the loop uses what LlamaForCausalLM returns at padding, where a batch without padding has nothing; leave padding out of "
    "the loss (labels of -100), or leave --pack out"
)


def test_a_loop_that_uses_padding_is_told_by_its_backward_pass() -> None:
    with pytest.raises(RefusalError) as caught:
        trained("--pack", of_all_positions)

    assert str(caught.value) == _USED


@pytest.mark.parametrize("rescue", [False, True], ids=["", "rescued"])
@pytest.mark.parametrize("before", ["", "--chunk-loss"])
def test_a_click_ends_no_loop(before: str, rescue: bool) -> None:
    words = 2048
    expected, *_ = trained(before, of_all_positions, words=words)

    losses, _, session = trained(before, of_all_positions, asks=f"{before} --pack", rescue=rescue, words=words)

    assert losses == expected
    (said,) = [entry.text for entry in session.log if entry.text.startswith("refused ")]
    assert said == f"refused {f'{before} --pack'.strip()}: {_USED}; {before or 'as written'} is back"


@pytest.mark.parametrize("loop", [of_model, of_loop])
def test_the_first_step_after_a_click_keeps_its_padding(loop: Loop) -> None:
    expected, *_ = trained("", loop, 4)

    seen: list[list[str]] = []

    def noted(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
        loss = loop(model, given)
        session = session_of(model)
        seen.append([] if session is None else notes(session))
        return loss

    losses, *_ = trained("", noted, 4, asks="--pack")

    assert losses[:2] == expected[:2]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert seen[1] == ["the first step keeps its padding: it is seen whether the loop uses what is computed there"]
    assert seen[2] == ["rows one after another: 29 of 48 positions of the last batch"]


def test_a_later_batch_that_cannot_be_packed_is_run_as_it_is() -> None:
    def losses(plan: str) -> tuple[list[float], list[str]]:
        model, optimizer = made(llama)
        found = []
        with fit(Workload(model, optimizer), plan) as session:
            for given in (batch(), batch((4, 4)), from_the_left(batch((6, 3))), batch((1, 7, 1))):
                loss = model(**given).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found, notes(session)

    expected, _ = losses("")
    found, said = losses("--pack")

    assert found == pytest.approx(expected, rel=1e-6)
    assert said == [
        "rows one after another: 9 of 21 positions of the last batch",
        "a batch without padding is run as it is",
        "a batch is run as it is, since the attention_mask of LlamaForCausalLM has padding before or within rows, not after them, or "
        "other values than 0 and 1",
    ]


def test_calls_without_gradients_keep_their_padding() -> None:
    model, optimizer = made(llama)
    with torch.no_grad():
        expected = model.eval()(**batch()).logits

    with fit(Workload(model, optimizer), "--pack"), torch.no_grad():
        assert torch.equal(model(**batch()).logits, expected)


class Counted(nn.Module):
    """Counts its calls, and takes no more positions at once than it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.most = llama(), 0, 100

    def forward(self, position_ids: torch.Tensor | None = None, **given: Any) -> Any:
        self.calls += 1
        if given["input_ids"].shape[1] > self.most:
            raise ValueError("too many positions")
        return self.inner(position_ids=position_ids, **given)


def test_what_the_forward_pass_counts_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    original = Judge.compared
    monkeypatch.setattr(Judge, "compared", lambda self, *given: (compared.append(1), original(self, *given))[1])
    model, optimizer = made(Counted)

    with fit(Workload(model, optimizer), "--pack"):
        for _ in range(6):
            model(**batch()).loss.backward()

    assert len(compared) == 1
    assert model.calls == 6


def test_a_batch_that_is_too_long_without_padding_is_run_as_it_is() -> None:
    model, optimizer = made(Counted)
    expected = model(**batch((16, 3, 14, 15))).loss
    model.most = 40

    with fit(Workload(model, optimizer), "--pack") as session:
        model(**batch((16, 3, 4, 5)))
        loss = model(**batch((16, 3, 14, 15))).loss

        assert notes(session)[1:] == [
            "a batch is run as it is, since Counted does not run where rows stand one after another: ValueError: too many positions"
        ]
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("has_room", [False, True])
def test_where_memory_does_not_suffice_two_rows_are_compared(monkeypatch: pytest.MonkeyPatch, has_room: bool) -> None:
    compared = []
    original = Judge.compared

    def heard(self: Judge, call: Any, whole: Any, layout: Any, ranges: Any) -> Any:
        compared.append(layout.rows)
        if layout.rows > 2:
            raise torch.OutOfMemoryError("no memory for these rows")
        return original(self, call, whole, layout, ranges)

    monkeypatch.setattr(Judge, "has_room_for", lambda *_: has_room)
    monkeypatch.setattr(Judge, "compared", heard)

    losses, *_ = trained("--pack")

    assert compared == ([4, 2] if has_room else [2])
    assert losses == pytest.approx(trained("")[0], rel=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("plan", ["--pack", "--pack --checkpoint"])
def test_a_prediction_knows_the_lengths_of_rows(plan: str, attention: str) -> None:
    model, optimizer = made(llama, attention)
    load = Workload(model, optimizer, batch=batch((40, 100, 50, 30)))

    (predicted,) = predict_all(load, plans=[plan], progress=lambda _: None)

    assert predicted.peak_allocated_bytes == pytest.approx(measure(load, plan, steps=2).peak_allocated_bytes, rel=0.02)


def test_a_prediction_without_values_says_so() -> None:
    model, optimizer = made(llama)
    mask = batch()["attention_mask"]

    def predicted_with(mask: torch.Tensor) -> Prediction:
        given = {**batch(), "attention_mask": mask}
        (found,) = predict_all(Workload(model, optimizer, batch=given), plans=["--pack"], progress=lambda _: None)
        return found

    # small masks of zeros and ones keep their values
    assert predicted_with(mask.float()).peak_allocated_bytes == pytest.approx(
        predicted_with(mask).peak_allocated_bytes, rel=0.01
    )
    assert predicted_with(2 * mask.float()).refused == (
        "padding: the attention_mask of LlamaForCausalLM has no values in a prediction, which knows those of whole numbers and small masks "
        f"alone{_LEAVE_OUT}"
    )


def test_rows_that_stand_in_one_are_not_split() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse("--pack --accumulate 2")

    assert str(caught.value) == (
        "--pack and --accumulate exclude each other: the rows of a packed batch stand in one row, which is not split; drop one of the "
        "two, or accumulate in the loop"
    )
