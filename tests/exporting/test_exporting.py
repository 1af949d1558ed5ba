"""Exported code is run, not read: the loops train, the arguments build, the files load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from memlab import Workload, fit
from memlab.errors import PlanError
from memlab.exporting import export, parts
from memlab.plan import Plan

transformers = pytest.importorskip("transformers")

TARGETS = ("torch", "trainer", "accelerate", "deepspeed")
EXACT = [
    "",
    "--accumulate 4",
    "--accumulate 3",
    "--checkpoint",
    "--checkpoint every:2",
    "--checkpoint selective",
    "--checkpoint budget:60KiB",
    "--accumulate 2 --checkpoint budget:40KiB --chunk-loss",
    "--precision fp32",
    "--precision tf32",
    "--optim adamw",
    "--offload optimizer",
    "--offload optimizer:disk",
    "--offload activations",
    "--offload activations:disk",
    "--chunk-loss",
    "--tile 3",
    "--tile 2 --checkpoint --accumulate 2",
    "--offload params",
    "--offload params:disk,optimizer",
    "--offload frozen,activations",
    "--release-grads",
    "--release-grads --accumulate 4",
    "--release-grads --checkpoint --offload optimizer",
    "--release-grads --offload optimizer:disk",
    "--accumulate 2 --checkpoint --offload optimizer:disk,activations:disk --chunk-loss",
    "--accumulate 4 --checkpoint selective --offload optimizer,activations",
]
CLOSE = [
    "--fp16",
    "--bf16",
    "--adam8bit",
    "--fp16 --chunk-loss --accumulate 2",
    "--bf16 --chunk-loss",
    "--accumulate 2 --checkpoint every:2 --bf16 --adam8bit --offload optimizer:disk",
    "--accumulate 2 --fp16 --offload optimizer:disk,activations:disk",
]
RUNS = ["--lora r=2", "--lora r=8 --base nf4", "--lora r=8 --base int8", "--lora dora,r=2,targets=c_attn --bf16 --accumulate 2 --checkpoint", "--precision pure-bf16", "--precision pure-bf16 --adam8bit --accumulate 2", "--optim adafactor", "--optim sgd",
        "--optim paged-adam8bit", "--precision pure-bf16 --optim adafactor --chunk-loss"]  # fmt: skip
EVERY_PLAN = [*EXACT, *CLOSE, *RUNS]


@pytest.fixture(autouse=True)
def _restores_matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def tiny_gpt2(dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def ragged_batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Rows of very different numbers of targets: a mean of means would be far off."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        ids = torch.randint(1, 64, (6, 12), generator=generator)
        labels = ids.clone()
        for row, length in enumerate((12, 2, 7, 1, 12, 3)):
            labels[row, length:] = -100
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return batches


def namespace_of(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(code, "<exported>", "exec"), namespace)
    return namespace


def train(flags: str, lr: float = 1e-3) -> tuple[list[float], list[torch.Tensor]]:
    model = tiny_gpt2()
    losses = namespace_of(export(Plan.parse(flags), "torch"))["train"](model, ragged_batches(), lr=lr)
    return losses, [parameter.detach().float().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], list[torch.Tensor]]:
    """A loop by hand: what exported code, the plain one included, is held against."""
    model = tiny_gpt2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in ragged_batches():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.few(8)
@pytest.mark.parametrize("flags", EXACT)
def test_torch_code_of_exact_techniques_trains_as_the_plain_loop(
    flags: str, reference: tuple[list[float], list[torch.Tensor]]
) -> None:
    losses, weights = train(flags)
    assert losses == pytest.approx(reference[0], rel=2e-6)
    # Adam divides by the root of the second moment: rounding of a tiny gradient shows in the weights
    assert all(torch.allclose(a, b, atol=2e-4) for a, b in zip(weights, reference[1], strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("flags", CLOSE)
def test_torch_code_of_inexact_techniques_stays_near_the_plain_loop(
    flags: str, reference: tuple[list[float], list[torch.Tensor]]
) -> None:
    if "8bit" in flags:
        pytest.importorskip("bitsandbytes")
    losses, weights = train(flags)
    assert losses == pytest.approx(reference[0], rel=5e-3)
    moved = [float((a - b).abs().max()) for a, b in zip(weights, train("--optim sgd", lr=0.0)[1], strict=True)]
    assert min(moved) > 1e-5


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("flags", RUNS)
def test_torch_code_of_other_optimizers_runs_and_updates(flags: str) -> None:
    if "8bit" in flags:
        pytest.importorskip("bitsandbytes")
    losses, _ = train(flags)
    assert len(losses) == 3
    assert all(3 < loss < 5 for loss in losses)


def test_torch_code_of_adapters_trains_as_the_live_plan() -> None:
    losses, _ = train("--lora r=2,alpha=6")
    torch.manual_seed(0)
    model = tiny_gpt2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    with fit(Workload(model, optimizer), "--lora r=2,alpha=6"):
        for batch in ragged_batches():
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found == losses


def test_trainer_code_of_adapters_wraps_a_model() -> None:
    namespace = namespace_of(export("--lora r=2,dropout=0.1,targets=c_attn", "trainer"))
    wrapped = namespace["with_adapters"](tiny_gpt2())
    assert {name.split(".")[-3] for name, p in wrapped.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    assert "peft.get_peft_model(model, LoraConfig(r=2, lora_alpha=4, " in export("--lora r=2", "accelerate")
    assert "adapters: peft.get_peft_model" in export("--lora r=2", "deepspeed")


def test_torch_accumulation_gives_the_gradient_of_the_unsplit_batch() -> None:
    """SGD shows gradients without Adam's rescaling; a mean of means is off by far more."""
    plain, split = (train(f"{flags} --optim sgd", lr=0.1)[1] for flags in ("", "--accumulate 4"))
    assert all(torch.allclose(a, b, atol=2e-7) for a, b in zip(plain, split, strict=True))


def test_torch_checkpointing_really_recomputes() -> None:
    calls = []
    for flags in ("", "--checkpoint", "--checkpoint every:2"):
        model = tiny_gpt2()
        counted = []
        for block in model.transformer.h:
            # the first part of a block: recomputing stops as soon as the last saved tensor is there
            block.ln_1.register_forward_hook(lambda *_, seen=counted: seen.append(1))
        namespace_of(export(Plan.parse(flags), "torch"))["train"](model, ragged_batches(1))
        calls.append(len(counted))
    assert calls == [2, 4, 3]


def test_torch_checkpointing_by_budget_chooses_blocks_on_the_first_batch() -> None:
    calls = []
    for budget in ("1MiB", "100KiB", "60KiB", "20KiB"):
        model, counted = tiny_gpt2(), []
        for block in model.transformer.h:
            block.ln_1.register_forward_hook(lambda *_, seen=counted: seen.append(1))
        namespace_of(export(Plan.parse(f"--checkpoint budget:{budget}"), "torch"))["train"](model, ragged_batches(1))
        calls.append(len(counted) - 2)  # two are of the look at what blocks keep
    assert calls == sorted(calls)
    assert (calls[0], calls[-1]) == (2, 4)
    with pytest.raises(ValueError, match="with all 2 blocks recomputed they still keep"):
        train("--checkpoint budget:1KiB")


class CountedProducts(TorchDispatchMode):
    """Counts matrix products, forward, recomputed and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_torch_selective_checkpointing_keeps_the_products() -> None:
    counts = {}
    for flags in ("", "--checkpoint selective", "--checkpoint"):
        run = namespace_of(export(Plan.parse(flags), "torch"))["train"]
        with CountedProducts() as products:
            run(tiny_gpt2(), ragged_batches(1))
        counts[flags] = products.count
    assert counts["--checkpoint selective"] == counts[""]
    assert counts["--checkpoint"] > counts[""]


class LargestLogits(TorchDispatchMode):
    """Keeps the most rows that a tensor as wide as the vocabulary has had."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1 and result.shape[-1] == 64:
            self.rows = max(self.rows, result.numel() // 64)
        return result


def test_torch_chunked_loss_never_has_all_logits() -> None:
    rows = {}
    for flags in ("", "--chunk-loss"):
        run, model = namespace_of(export(flags, "torch"))["train"], tiny_gpt2()
        (batch,) = ragged_batches(1)
        with LargestLogits() as largest:
            run(model, [{name: value.repeat(8, 1) for name, value in batch.items()}])
        rows[flags] = largest.rows
    assert rows == {"": 8 * 6 * 12, "--chunk-loss": 8 * 6 * 11 // 8}


def stepped_adam() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    return optimizer


def test_torch_state_on_disk_leaves_memory_and_comes_back(tmp_path: Path) -> None:
    helpers = namespace_of(export(Plan.parse("--offload optimizer:disk"), "torch"))
    optimizer = stepped_adam()
    (state,) = optimizer.state.values()
    kept = {name: value.clone() for name, value in state.items()}
    with (tmp_path / "state").open("w+b") as file:
        helpers["write_state"](optimizer, file)
        assert state == {}
        helpers["read_state"](optimizer, file)
    assert all(torch.equal(state[name], value) for name, value in kept.items())


def test_torch_state_moves_to_the_host_but_its_step_counter_stays() -> None:
    helpers = namespace_of(export(Plan.parse("--offload optimizer"), "torch"))
    optimizer = stepped_adam()
    helpers["move_state"](optimizer, "meta")
    (state,) = optimizer.state.values()
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta",
    }  # fmt: skip


def test_torch_activations_on_disk_are_files_but_parameters_are_not(tmp_path: Path) -> None:
    helpers = namespace_of(export(Plan.parse("--offload activations:disk"), "torch"))
    layer = torch.nn.Linear(8, 8)
    inputs = torch.ones(3, 8, requires_grad=True)
    with helpers["activations_on_disk"](layer, str(tmp_path)):
        loss = layer(inputs).square().sum()
    assert len(list(tmp_path.iterdir())) == 2  # the layer's inputs and what is squared; not the weight
    loss.backward()
    assert torch.allclose(inputs.grad, 2 * layer(inputs).detach() @ layer.weight)


def test_torch_checkpointing_serves_models_that_are_not_of_transformers() -> None:
    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            for block in self.blocks:
                x = block(x).relu()
            return transformers.utils.ModelOutput(loss=x.square().mean())

    model = Stack()
    calls: list[int] = []
    original = model.blocks[0].forward
    model.blocks[0].forward = lambda x: (calls.append(1), original(x))[1]  # type: ignore[method-assign]
    losses = namespace_of(export(Plan.parse("--checkpoint --accumulate 2"), "torch"))["train"](
        model, [{"x": torch.randn(4, 8)}]
    )
    assert len(losses) == 1
    assert len(calls) == 4  # two micro-batches, each computed and recomputed


def test_empty_plan_prints_the_plain_loop() -> None:
    code = export(Plan(), "torch")
    for word in ("checkpoint", "autocast", "scaler", "split", "offload", "bitsandbytes", "tempfile"):
        assert word not in code
    assert len(code.splitlines()) < 30


@pytest.mark.few
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("flags", EVERY_PLAN)
def test_every_export_names_its_plan_and_no_line_is_endless(flags: str, target: str) -> None:
    text = export(Plan.parse(flags), target)
    assert flags == "" or str(Plan.parse(flags)) in text
    assert target in ("deepspeed", "accelerate") or max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("flags", EVERY_PLAN)
def test_trainer_arguments_build(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # the formats of a GPU: the arguments are asked for on a machine that has none
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.enable_tf32", lambda enable: None)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    plan = Plan.parse(flags)
    args = namespace_of(export(plan, "trainer"))["args"]
    assert args.gradient_accumulation_steps == plan.accumulation
    assert args.gradient_accumulation_steps * args.per_device_train_batch_size in (8, 6)
    assert bool(checkpointing_of(args)) == (plan.checkpointing in ("full", "every:2"))
    assert (args.fp16, args.bf16) == (plan.precision == "fp16", plan.precision == "bf16")
    assert json.loads(args.to_json_string())["optim"] == {
        "adam8bit": "adamw_bnb_8bit", "paged-adam8bit": "paged_adamw_8bit", "adafactor": "adafactor", "sgd": "sgd",
    }.get(plan.optimizer, args.optim)  # fmt: skip


def checkpointing_of(args: Any, suffix: str = "") -> Any:
    """An argument by its name since Transformers 5.23, or by the one before."""
    is_new = hasattr(args, "activation_checkpointing")
    return getattr(args, f"{'activation' if is_new else 'gradient'}_checkpointing{suffix}")


def test_trainer_every_n_reaches_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = namespace_of(export(Plan.parse("--checkpoint every:3"), "trainer"))["args"]
    assert checkpointing_of(args, "_kwargs") == {"use_reentrant": False, "every_n_layers": 3}


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_trainer_has_checkpointing_by_either_name(name: str) -> None:
    given: dict[str, Any] = {}
    arguments = type("TrainingArguments", (), {name: None, "__init__": lambda _self, **values: given.update(values)})
    code = export("--checkpoint", "trainer").replace("from transformers import TrainingArguments", "")
    exec(code, {"TrainingArguments": arguments})
    assert given == {"output_dir": "out", name: True, f"{name}_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize("flags", ["--checkpoint", "--checkpoint every:2", "--checkpoint selective"])
@pytest.mark.parametrize("name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_models_have_checkpointing_by_either_name(flags: str, name: str) -> None:
    model = tiny_gpt2()
    given: list[Any] = []
    # no more of it than Transformers 5.6 has
    only = type("Model", (torch.nn.ModuleList,), {name: lambda _self, settings: given.append({*settings})})
    namespace_of(export(flags, "torch"))["checkpoint_blocks"](only([model.transformer.h]))
    assert given == [{"use_reentrant", "context_fn"} if "selective" in flags else {"use_reentrant"}]
    if flags == "--checkpoint every:2":
        assert [block.gradient_checkpointing for block in model.transformer.h] == [True, False]


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("--checkpoint", []),
        ("--checkpoint every:3", ["# needs transformers 5.16 or newer: every_n_layers"]),
        ("--scale ddp --checkpoint every:2", ["# needs transformers 5.16 or newer: every_n_layers"]),
        (
            "--scale fsdp2",
            [
                "# needs transformers 5.10 or newer: older ones pass over auto_wrap_policy and cpu_offload in fsdp_config"
            ],
        ),
    ],
)
def test_what_needs_a_newer_library_says_so_first(flags: str, needed: list[str]) -> None:
    lines = export(flags, "trainer").splitlines()
    assert [line for line in lines if "needs" in line] == lines[1 : 1 + len(needed)] == needed


def test_trainer_workaround_names_an_attribute_trainer_goes_by(tmp_path: Path) -> None:
    text = export(Plan.parse("--accumulate 4"), "trainer")
    assert "# trainer.model_accepts_loss_kwargs = False" in text
    assert "4 times too large" in text
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(**sizes, vocab_size=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    rows = [{"input_ids": torch.arange(8) + row, "labels": torch.tensor(row % 2)} for row in range(8)]
    norms = []
    for micro, is_mended in ((1, False), (4, False), (4, True)):
        torch.manual_seed(0)
        settings: dict[str, Any] = {"per_device_train_batch_size": 8 // micro, "gradient_accumulation_steps": micro}
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=1, logging_steps=1, use_cpu=True, report_to="none", save_strategy="no", **settings
        )
        trainer = transformers.Trainer(transformers.BertForSequenceClassification(config), args, train_dataset=rows)
        if is_mended:
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
        norms.append(next(line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line))
    assert norms[1] == pytest.approx(4 * norms[0], rel=1e-3)
    assert norms[2] == pytest.approx(norms[0], rel=1e-3)


def test_trainer_says_what_it_has_no_argument_for() -> None:
    text = export(Plan.parse("--offload optimizer,activations:disk --chunk-loss --precision pure-bf16"), "trainer")
    assert "cannot offload parameters" in export(Plan.parse("--offload params"), "trainer")
    for target in ("torch", "trainer", "accelerate", "deepspeed"):
        assert "frozen models stay on the device: accelerate.cpu_offload(" in export(
            Plan.parse("--offload frozen"), target
        )
    for word in ("cannot offload optimizer state", "cannot chunk the loss", "nothing for files", "def to_bf16"):
        assert word in text


@pytest.mark.parametrize("target", ["trainer", "accelerate", "deepspeed"])
def test_what_cannot_release_gradients_says_so(target: str) -> None:
    assert "gradient" not in export(Plan(), target).replace("gradient_", "")
    text = export(Plan.parse("--release-grads"), target)
    assert "update_in_backward" in text or "keeps gradients until then" in text


def test_trainer_trains_with_checkpointing_and_offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = export(Plan.parse("--checkpoint selective --offload activations --accumulate 2"), "trainer")
    settings = 'output_dir="out", max_steps=1, use_cpu=True, report_to="none",'
    namespace = namespace_of(code.replace('output_dir="out",', settings))
    model = tiny_gpt2()
    namespace["checkpoint_blocks"](model)
    rows = [{name: value[0] for name, value in batch.items()} for batch in ragged_batches(8)]
    trainer = namespace["OffloadingTrainer"](model=model, args=namespace["args"], train_dataset=rows)
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize("flags", EVERY_PLAN)
def test_accelerate_file_loads_with_accelerates_own_loader(flags: str, tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    plan = Plan.parse(flags)
    file = tmp_path / "accelerate.yaml"
    file.write_text(export(plan, "accelerate"), encoding="utf-8")
    config = config_args.load_config_from_file(str(file))
    assert config.mixed_precision == (plan.precision if plan.precision in ("fp16", "bf16") else "no")
    is_offloaded = not {"optimizer", "params"}.isdisjoint(dict(plan.offload))
    assert str(config.distributed_type.value) == ("DEEPSPEED" if is_offloaded else "NO")
    if is_offloaded:
        assert config.deepspeed_config["gradient_accumulation_steps"] == plan.accumulation


def test_accelerate_file_is_taken_by_the_launcher(tmp_path: Path) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    file = tmp_path / "accelerate.yaml"
    plan = Plan.parse("--fp16 --offload optimizer:disk --accumulate 2")
    file.write_text(export(plan, "accelerate"), encoding="utf-8")
    parser = launch.launch_command_parser()
    args = parser.parse_args(["--config_file", str(file), "train.py"])
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    unknown = set(settings["deepspeed_config"]) - set(vars(args))
    assert not unknown


@pytest.mark.parametrize("flags", EVERY_PLAN)
def test_deepspeed_file_is_accepted_and_agrees_with_the_plan(flags: str) -> None:
    deepspeed_utils = pytest.importorskip("accelerate.utils.deepspeed")
    plan = Plan.parse(flags)
    config = deepspeed_utils.HfDeepSpeedConfig(json.loads(export(plan, "deepspeed")))
    assert config.get_value("gradient_accumulation_steps") == plan.accumulation
    assert config.is_true("fp16.enabled") == (plan.precision == "fp16")
    assert config.is_true("bf16.enabled") == (plan.precision in ("bf16", "pure-bf16"))
    tier, params = (dict(plan.offload).get(what) for what in ("optimizer", "params"))
    devices = {None: None, "auto": "cpu", "host": "cpu", "disk": "nvme"}
    assert config.get_value("zero_optimization.offload_optimizer.device") == devices[tier]
    assert config.get_value("zero_optimization.offload_param.device") == devices[params]
    assert config.is_zero3() == (tier == "disk" or params is not None)
    assert config.is_zero2() == (not config.is_zero3() and (tier is not None or plan.precision == "pure-bf16"))


def test_deepspeed_auto_values_are_filled_by_the_trainer() -> None:
    """Every "auto" stands where transformers fills it in."""
    known = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping",
             "lr", "betas", "eps", "weight_decay"}  # fmt: skip
    for flags in [*EVERY_PLAN, "--optim adamw --offload optimizer"]:
        config = json.loads(export(Plan.parse(flags), "deepspeed"))
        flat = {**config, **config.get("optimizer", {}).get("params", {})}
        assert {name for name, value in flat.items() if value == "auto"} <= known


def test_deepspeed_own_optimizer_asks_for_leave() -> None:
    config = json.loads(export(Plan.parse("--adam8bit --offload optimizer"), "deepspeed"))
    assert config["zero_allow_untested_optimizer"] is True
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert any("AdamW8bit" in note for note in config["memlab_notes"])


def test_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(PlanError) as caught:
        export(Plan(), "jax")
    assert str(caught.value) == "export to 'jax': allowed are torch, trainer, accelerate, deepspeed, fsdp2"


@pytest.mark.parametrize("target", ["torch", "trainer", "accelerate", "deepspeed"])
def test_two_optimizers_in_one_are_not_exported(target: str) -> None:
    with pytest.raises(PlanError) as refused:
        export(Plan.parse("--optim muon"), target)
    assert str(refused.value) == (
        "--optim muon cannot be exported: it is two optimizers, muon for the matrices of blocks and AdamW for the rest; "
        "choose another one with --optim"
    )


@pytest.mark.parametrize("to", TARGETS)
def test_a_setting_that_no_target_writes_is_named(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = "left out, since only memlab does it: --tile 2"
    assert left_out not in export("--bf16 --tile 2", to)
    monkeypatch.setattr(parts, "WRITTEN", parts.WRITTEN - {"tiling"})
    assert left_out in export("--bf16 --tile 2", to)
