from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from memlab import Plan, Workload
from memlab.errors import MemlabError
from memlab.hardware.gpus import gpu
from memlab.trace.cuda_choices import cuda_choices
from memlab.trace.cuda_thread import current_gpu
from memlab.trace.tracer import Choices, Tracer
from tests.trace.cuda_twins import FAKE, SINCE_2_14, Operators, fake, twin_of

A100, H200, T4 = gpu("A100 80GB"), gpu("H200"), gpu("T4")
BF16 = torch.bfloat16
FLASH, CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


def dispatch_tables() -> dict[str, str]:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return {name: torch._C._dispatch_dump_table(name) for name in names}


def autocast_step() -> list[tuple[str, torch.dtype | None]]:
    """A step on real tensors that meets every kind of choice."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with Operators() as operators:
        with torch.autocast("cpu", dtype=BF16):
            out = model(torch.randn(2, 4, 16))
            loss = F.cross_entropy(out.flatten(0, 1), torch.arange(8)) + out.exp().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return operators.seen


# --- nothing is left behind -----------------------------------------------------------------------


def test_a_step_afterwards_is_what_it_was() -> None:
    step_before, tables_before = autocast_step(), dispatch_tables()

    for chosen in (A100, T4):
        with cuda_choices(chosen):
            assert current_gpu() is chosen

    assert current_gpu() is None
    assert dispatch_tables() == tables_before
    assert autocast_step() == step_before


def test_a_step_in_another_thread_stays_what_it_is() -> None:
    alone, found = autocast_step(), []

    with cuda_choices(A100):
        other = threading.Thread(target=lambda: found.append(autocast_step()))
        other.start()
        other.join()

    assert found == [alone]


def test_threads_trace_for_their_own_gpu() -> None:
    both_inside, seen = threading.Barrier(2), {}

    def trace(name: str) -> None:
        with FakeTensorMode():  # one of its own: a mode serves one thread at a time
            q = torch.empty(2, 4, 16, 64, dtype=BF16)
        with cuda_choices(gpu(name)), Operators() as operators:
            both_inside.wait(timeout=30)
            F.scaled_dot_product_attention(q, q, q)
            both_inside.wait(timeout=30)
        seen[name] = operators.names

    tables = dispatch_tables()
    threads = [threading.Thread(target=trace, args=(name,)) for name in ("A100 80GB", "H200")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen == {"A100 80GB": [FLASH], "H200": [CUDNN]}
    assert dispatch_tables() == tables


def test_choices_nest() -> None:
    q = fake(2, 4, 16, 64, dtype=BF16)

    with cuda_choices(A100), Operators() as operators:
        with cuda_choices(H200):
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)

    assert operators.names == [CUDNN, FLASH]


def test_an_error_inside_leaves_nothing() -> None:
    tables = dispatch_tables()

    with pytest.raises(ZeroDivisionError), cuda_choices(A100):
        raise ZeroDivisionError

    assert dispatch_tables() == tables
    assert current_gpu() is None


def test_no_warning_is_given_and_none_is_used_up() -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        with cuda_choices(A100):
            pass

    assert given == []
    assert not torch.is_warn_always_enabled()


def test_a_torch_without_a_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import _foreach_utils

    tables = dispatch_tables()
    with monkeypatch.context() as patch:
        patch.delattr(_foreach_utils, "_foreach_supported_types")
        expected = r"has no torch.utils._foreach_utils._foreach_supported_types, which memlab needs to trace"
        with pytest.raises(MemlabError, match=expected), cuda_choices(A100):
            pass

    assert dispatch_tables() == tables
    with cuda_choices(A100):
        assert current_gpu() is A100


# --- models ---------------------------------------------------------------------------------------


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=2048, n_positions=32, bos_token_id=0, eos_token_id=0)
    )
    ids = torch.randint(0, 2048, (4, 16))
    return model, {"input_ids": ids, "labels": ids.clone()}


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    ids = torch.randint(0, 96, (2, 16))
    return model, {"input_ids": ids, "labels": ids.clone()}


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=96))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 10:] = 0
    return model, {"input_ids": torch.randint(0, 96, (2, 16)), "attention_mask": mask, "labels": torch.tensor([0, 1])}


def vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4))
    return model, {"pixel_values": fake(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def trained(make: Callable[[], Any], chosen: Any, dtype: torch.dtype | None) -> tuple[nn.Module, Operators]:
    model, batch = make()
    twin = twin_of(model.train())
    # without the fake mode: masks and positions are real, and models decide by them as they would
    with cuda_choices(chosen), Operators() as operators:
        with torch.autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
            loss = twin(**batch).loss
        loss.backward()
    return twin, operators


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("make", "chosen", "dtype", "attention"),
    [
        (gpt2, A100, BF16, FLASH),
        (gpt2, H200, BF16, FLASH),  # its dropout is no multiple of 1/16
        (gpt2, A100, None, EFFICIENT),
        (gpt2, T4, torch.float16, EFFICIENT),
        (llama, A100, BF16, FLASH),
        (llama, H200, BF16, CUDNN),
        (llama, A100, None, EFFICIENT if SINCE_2_14 else "_safe_softmax"),  # grouped heads in fp32
        (bert, A100, BF16, EFFICIENT),
        (bert, T4, None, EFFICIENT),
        (vit, A100, BF16, FLASH),
        (vit, H200, BF16, CUDNN),
        (vit, A100, None, EFFICIENT),
    ],
)
def test_models_of_transformers_take_cudas_kernels(
    make: Callable[[], Any], chosen: Any, dtype: torch.dtype | None, attention: str
) -> None:
    twin, operators = trained(make, chosen, dtype)

    assert attention in operators.names
    assert not {"bernoulli_.float", "_scaled_dot_product_flash_attention_for_cpu"} & set(operators.names)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in twin.parameters() if p.requires_grad)
    assert set(operators.dtypes("native_layer_norm")) <= {torch.float32}


def test_multi_head_attention_is_seen_inside() -> None:
    twin = twin_of(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True))

    with cuda_choices(A100), Operators() as operators:
        with torch.autocast("cpu", dtype=BF16):
            out = twin(fake(2, 16, 64))
        out.sum().backward()

    assert operators.count(FLASH) == 1
    assert operators.count("native_dropout") == 3
    assert operators.dtypes("addmm") == [BF16] * 3
    assert set(operators.dtypes("native_layer_norm")) == {torch.float32}


def test_convolutions_and_recurrent_layers_train() -> None:
    picture = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    series = nn.LSTM(4, 8, 2, batch_first=True, dropout=0.1)

    for model, shape in ((picture, (2, 3, 8, 8)), (series, (2, 5, 4))):
        twin = twin_of(model)
        with cuda_choices(A100), FAKE, Operators() as operators:
            out = twin(fake(*shape))
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert "bernoulli_.float" not in operators.names


# --- together with what else intervenes -----------------------------------------------------------


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return F.dropout(rows, 0.5) * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def test_functions_with_a_backward_of_their_own_are_seen_inside() -> None:
    rows = fake(4, 8, trained=True)

    with cuda_choices(A100), Operators() as operators:
        _Doubled.apply(rows).sum().backward()

    assert operators.names[0] == "native_dropout"
    assert rows.grad is not None


def test_recomputation_makes_the_same_choices() -> None:
    layer = twin_of(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True))
    rows = fake(2, 16, 64, trained=True)

    with cuda_choices(A100), Operators() as operators:
        with torch.autocast("cpu", dtype=BF16):
            out = checkpoint(layer, rows, use_reentrant=False)
        out.sum().backward()

    assert operators.count(FLASH) == 2
    assert operators.count("native_dropout") >= 5
    assert set(operators.dtypes("native_layer_norm")) == {torch.float32}


def test_saved_tensors_hooks_see_what_cuda_would_save() -> None:
    saved: list[torch.dtype] = []
    rows = fake(4, 8, trained=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.dtype)
        return tensor

    with cuda_choices(A100), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.dropout(rows, 0.5).sum().backward()

    assert saved == [torch.bool]


def traced(flags: str, chosen: Any) -> Operators:
    """The operators of two steps of a session on a twin, as the tracer runs them."""
    model, batch = gpt2()
    workload = Workload(model.train(), torch.optim.AdamW(model.parameters()), batch=batch)
    operators = Operators()

    @contextmanager
    def entered() -> Iterator[None]:
        with cuda_choices(chosen), operators:
            yield

    Tracer(workload, torch.device("cuda"), Choices(entered)).steps(Plan.parse(flags))
    return operators


PLANS = ["--bf16 --checkpoint", "--bf16 --checkpoint selective", "--accumulate 2 --bf16", "--adam8bit", "--chunk-loss",
         "--precision pure-bf16", "--offload activations", "--accumulate 2 --bf16 --chunk-loss --adam8bit"]  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("flags", PLANS)
def test_a_session_with_techniques_runs_on_the_twin(flags: str) -> None:
    names = set(traced(flags, A100).names)

    assert (FLASH if "bf16" in flags else EFFICIENT) in names
    assert (f"{FLASH}_backward" if "bf16" in flags else f"{EFFICIENT}_backward") in names
    assert "native_dropout" in names
    assert not {"bernoulli_.float", "_scaled_dot_product_flash_attention_for_cpu"} & names
    if "adam8bit" not in flags:
        assert "_foreach_addcdiv_.ScalarList" in names


def test_a_session_in_fp16_runs_on_the_twin() -> None:
    operators = traced("--fp16 --checkpoint", T4)

    assert set(operators.dtypes(EFFICIENT)) == {torch.float16}
    assert set(operators.dtypes("native_layer_norm")) == {torch.float32}
    assert "_foreach_addcdiv_.ScalarList" in operators.names
