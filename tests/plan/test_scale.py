"""An engine, and what goes together with it."""

from __future__ import annotations

import pytest

from memlab.errors import PlanError, RefusalError
from memlab.plan.scale import ENGINES, Scale


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_printed_is_read(engine: str) -> None:
    scale = Scale.parse(f"--bf16 --scale={engine} --checkpoint")
    assert Scale.parse(str(scale)) == scale
    assert str(scale.plan) == "--checkpoint --bf16"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--bf16", r"^'--bf16': expected --scale and one of ddp, fsdp2, tp, zero1"),
        ("--scale", r"expected --scale and one of"),
        ("--scale fsdp", r"^--scale fsdp: allowed are ddp, .*; did you mean fsdp2\?$"),
        ("--scale ddp --fast", r"^unknown flag --fast"),
    ],
)
def test_what_is_no_engine_is_named(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Scale.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--scale ddp --tile 2", r"^scale: tiling is not available under --scale ddp; leave it out"),
        ("--scale zero3 --adam8bit", r"^scale: 8-bit moments have a scale .*, and zero3 keeps parts"),
        (
            "--scale zero3 --checkpoint selective",
            r"^scale: --checkpoint selective replays operators .*; use --checkpoint, or --scale fsdp2$",
        ),
        ("--scale fsdp2 --fp16", r"^scale: --precision fp16 needs scaled losses .*; use --bf16$"),
        (
            "--scale fsdp2 --offload activations",
            r"^scale: --offload activations is not available .*; use --checkpoint$",
        ),
        (
            "--scale ddp --offload optimizer",
            r"^scale: ddp keeps optimizer state on the device; use --scale fsdp2 or zero2$",
        ),
        (
            "--scale zero2 --offload params",
            r"^scale: zero2 keeps parameters on the device; use --scale fsdp2 or zero3$",
        ),
        ("--scale tp --offload optimizer", r"^scale: tp keeps optimizer state on the device; use"),
        (
            "--scale fsdp2 --offload params",
            r"^scale: fsdp2 updates parameters where they rest, .*; use --offload params,opt",
        ),
        (
            "--scale zero3 --offload params:nvme,optimizer:nvme",
            r"^scale: parameters that DeepSpeed 0.19 swaps .*; use --offload optimizer:disk,params$",
        ),
        ("--scale zero2 --offload optimizer:disk", r"^scale: zero2 does not offload to files; use --scale zero3$"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, said: str) -> None:
    with pytest.raises(RefusalError, match=said):
        Scale.parse(text)


def test_a_half_that_cannot_be_had_is_said() -> None:
    assert (
        Scale.parse("--scale fsdp2 --offload optimizer").notes[0].startswith("FSDP2 offloads parameters and gradients")
    )
    assert Scale.parse("--scale fsdp2 --offload params,optimizer").notes == ()
    assert Scale.parse("--scale zero3 --offload optimizer:nvme,params").uses_files
    assert not Scale.parse("--scale zero3 --offload optimizer,params").uses_files
