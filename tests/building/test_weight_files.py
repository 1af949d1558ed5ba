"""Weights from safetensors files into models that callables make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import memlab
import memlab.building.files as files
from memlab.errors import BuildError
from tests.building.conftest import Rotary, Tied, plain, recurrent


def saved(model: nn.Module, folder: Path, **extra: torch.Tensor) -> Path:
    path = folder / "weights.safetensors"
    save_file({**model.state_dict(), **extra}, path)
    return path


def sharded(model: nn.Module, folder: Path) -> Path:
    names = {}
    for index, name in enumerate(model.state_dict()):
        names[name] = f"part-{index % 3}.safetensors"
    for file in set(names.values()):
        save_file({name: model.state_dict()[name] for name in names if names[name] == file}, folder / file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": names}))
    return index_file


@pytest.mark.few
@pytest.mark.parametrize("batch_bytes", [1, files._BATCH_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factory", [plain, recurrent, Rotary], ids=lambda factory: factory.__name__)
def test_weights_are_those_of_the_file(factory, dtype, batch_bytes, tmp_path, wide_bytes, monkeypatch):
    monkeypatch.setattr(files, "_BATCH_BYTES", batch_bytes)
    original = factory()
    state = torch.get_rng_state()
    built = memlab.build(factory, dtype=dtype, weights=saved(original, tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in built.state_dict().items():
        assert tensor.equal(original.state_dict()[name].to(tensor.dtype)), name
    assert {p.dtype for name, p in built.named_parameters() if "router" not in name} == {dtype}


def test_buffers_that_are_not_in_the_file_are_computed(tmp_path):
    built = memlab.build(Rotary, dtype="bf16", weights=saved(Rotary(), tmp_path))
    assert built.frequencies.equal(Rotary().frequencies)


def test_shards_by_index_or_by_folder(tmp_path):
    original = plain()
    index = sharded(original, tmp_path)
    for path in (index, tmp_path, str(tmp_path)):
        built = memlab.build(plain, weights=path)
        assert all(tensor.equal(original.state_dict()[name]) for name, tensor in built.state_dict().items())


def test_a_tied_tensor_stands_in_the_file_once(tmp_path):
    original = Tied()
    save_model(original, str(tmp_path / "tied.safetensors"))
    built = memlab.build(Tied, dtype="bf16", weights=tmp_path)
    assert built.head.weight is built.embedding.weight
    assert built.head.weight.equal(original.head.weight.to(torch.bfloat16))


def test_missing_and_unexpected_names_are_named(tmp_path):
    held = plain().state_dict()
    del held["2.bias"]
    path = tmp_path / "weights.safetensors"
    save_file({**held, "old.weight": torch.ones(2)}, path)
    with pytest.raises(BuildError, match=r"missing: 2\.bias; unexpected: old\.weight\); strict=False leaves"):
        memlab.build(plain, weights=path)


def test_not_strict_leaves_missing_ones_at_their_initial_values(tmp_path):
    held = {"2.weight": torch.ones(20, 24), "old.weight": torch.ones(2)}
    save_file(held, tmp_path / "weights.safetensors")
    torch.manual_seed(0)
    fresh = plain().to(torch.bfloat16)
    torch.manual_seed(0)
    built = memlab.build(plain, dtype="bf16", weights=tmp_path, strict=False)
    assert built[2].weight.eq(1).all()
    assert built[5].weight.equal(fresh[5].weight)


def test_other_shapes_are_named_before_anything_is_read(tmp_path):
    held = {**plain().state_dict(), "2.weight": torch.ones(20, 25)}
    save_file(held, tmp_path / "weights.safetensors")
    with pytest.raises(BuildError, match=r"2\.weight is \(20, 25\), not \(20, 24\)"):
        memlab.build(plain, weights=tmp_path)


def damaged(folder: Path) -> Path:
    path = folder / "damaged.safetensors"
    path.write_bytes(b"\x08" + bytes(7) + b"notjson!")
    return path


def two_files(folder: Path) -> Path:
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, folder / f"{name}.safetensors")
    return folder


def index_of_nothing(folder: Path) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"2.weight": "gone.safetensors"}}))
    return path


def no_index(folder: Path) -> Path:
    path = folder / "other.index.json"
    path.write_text("[]")
    return path


def index_that_lies(folder: Path) -> Path:
    index = sharded(plain(), folder)
    content = json.loads(index.read_text())
    content["weight_map"]["2.weight"] = content["weight_map"]["2.bias"]
    index.write_text(json.dumps(content))
    return index


def pickled(folder: Path) -> Path:
    torch.save({}, folder / "weights.bin")
    return folder / "weights.bin"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (damaged, r"cannot be read as safetensors"),
        (two_files, r"found a\.safetensors, b\.safetensors; name the file"),
        (index_of_nothing, r"names files that are not beside it: gone\.safetensors"),
        (no_index, r"expected JSON with a 'weight_map'"),
        (index_that_lies, r"does not hold what the index says: 2\.weight"),
        (pickled, r"expected a \.safetensors file, an index of shards .* or a folder"),
        (lambda folder: folder / "gone.safetensors", r"no such file or folder"),
        (lambda folder: folder, r"found neither"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_files_that_will_not_do(path, message, tmp_path):
    given, state = path(tmp_path), torch.get_rng_state()
    with pytest.raises(BuildError, match=message):
        memlab.build(plain, weights=given)
    assert torch.equal(torch.get_rng_state(), state)
