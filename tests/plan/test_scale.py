"""An engine, and what goes together with it."""

from __future__ import annotations

import pytest

from memlab.errors import PlanError, RefusalError
from memlab.plan.scale import Scale
from memlab.plan.settings.scale import ENGINES


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_printed_is_read(engine: str) -> None:
    scale = Scale.parse(f"--bf16 --scale={engine} --checkpoint")
    assert Scale.parse(str(scale)) == scale
    assert str(scale.plan) == "--checkpoint --bf16"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--bf16", r"^'--bf16': expected --scale and one of ddp, fsdp2, tp, zero1"),
        ("--scale", r"^--scale needs a value: --scale ddp\|fsdp2\|tp\|zero1"),
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
        ("--scale ddp --tile 2", "--tile 2 exclude each other: the engine has the model; drop one of the two"),
        (
            "--scale zero3 --adam8bit",
            "--adam8bit exclude each other: 8-bit .*, and zero3 keeps .*; use --scale ddp, or",
        ),
        ("--scale zero3 --checkpoint selective", "each other: it replays .*; use --checkpoint, or --scale fsdp2"),
        ("--scale fsdp2 --fp16", "each other: it needs scaled losses .*; use --bf16"),
        ("--scale fsdp2 --offload activations", "the engine runs the model; use --checkpoint"),
        (
            "--scale ddp --offload optimizer",
            "ddp keeps optimizer state on the device; use --scale fsdp2, zero2 or zero3",
        ),
        ("--scale zero2 --offload params", "zero2 keeps parameters on the device; use --scale fsdp2 or zero3"),
        ("--scale tp --offload optimizer", "tp keeps optimizer state on the device; use"),
        ("--scale fsdp2 --offload params", "fsdp2 has .* state where parameters are; use --offload optimizer,params"),
        (
            "--scale zero3 --offload params:nvme,optimizer:nvme",
            "parameters that DeepSpeed 0.19 swaps .*; use --offload optimizer:disk,params",
        ),
        (
            "--scale zero2 --offload optimizer:disk",
            "zero2 does not offload to files; drop ':disk', or use --scale zero3",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, said: str) -> None:
    with pytest.raises(RefusalError, match=rf"^scale: {' '.join(text.split()[:2])} and .*{said}"):
        Scale.parse(text)


def test_a_half_that_cannot_be_had_is_said() -> None:
    assert (
        Scale.parse("--scale fsdp2 --offload optimizer").notes[0].startswith("FSDP2 offloads parameters and gradients")
    )
    assert Scale.parse("--scale fsdp2 --offload params,optimizer").notes == ()
    assert Scale.parse("--scale zero3 --offload optimizer:nvme,params").uses_files
    assert not Scale.parse("--scale zero3 --offload optimizer,params").uses_files
