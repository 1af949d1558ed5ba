"""Models of Transformers from configurations and from folders."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import memlab
from memlab.building import pretrained
from memlab.building.target import BuildTarget
from memlab.errors import BuildError, MissingExtraError
from tests.building.built_models import families, tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["GPT-2", "Llama", "BERT"])
def family(request):
    return families()[request.param]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_from_a_class_and_a_configuration(family, dtype, wide_bytes):
    model_class, config = family
    before = config.to_dict()
    torch.manual_seed(4)
    usual = model_class(config).to(dtype)
    torch.manual_seed(4)
    built = memlab.build((model_class, config), dtype=dtype)
    assert config.to_dict() == before
    assert type(built) is model_class
    assert built.config.dtype == dtype
    assert built.training
    for name, tensor in tensors(built).items():
        if not name.endswith("inv_freq"):
            assert tensor.dtype == tensors(usual)[name].dtype, name
            assert tensor.equal(tensors(usual)[name]), name
    head, embedding = built.get_output_embeddings(), built.get_input_embeddings()
    assert (head.weight is embedding.weight) == config.tie_word_embeddings


def test_from_a_configuration_alone_that_names_its_class():
    config = families()["Llama"][1]
    with pytest.raises(BuildError, match=r"LlamaConfig does not say which model it is for \(architectures=None\)"):
        memlab.build(config)
    config.architectures = ["LlamaForCausalLM"]
    assert type(memlab.build(config, dtype="bf16")) is hf.LlamaForCausalLM
    config.architectures = ["MyOwn"]
    with pytest.raises(BuildError, match=r"names MyOwn, which Transformers does not have"):
        memlab.build(config)


def test_an_auto_class_chooses_by_the_configuration():
    assert type(memlab.build((hf.AutoModelForCausalLM, families()["GPT-2"][1]))) is hf.GPT2LMHeadModel


def test_without_a_dtype_the_configuration_decides():
    config = families()["Llama"][1]
    config.dtype = torch.bfloat16
    assert memlab.build((hf.LlamaForCausalLM, config)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=str)
def test_from_a_folder(family, dtype, tmp_path):
    model_class, config = family
    original = model_class(config).eval()
    original.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    built = memlab.build(tmp_path, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(built) is model_class
    assert built.dtype == (dtype or torch.float32)
    for name, tensor in tensors(built).items():
        if name.endswith("inv_freq"):
            assert tensor.dtype == torch.float32
        assert tensor.equal(tensors(original)[name].to(tensor.dtype)), name
    head, embedding = built.get_output_embeddings(), built.get_input_embeddings()
    assert (head.weight is embedding.weight) == config.tie_word_embeddings


def test_from_a_folder_of_shards(tmp_path):
    model_class, config = families()["Llama"]
    original = model_class(config)
    original.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    built = memlab.build((model_class, str(tmp_path)), dtype="bf16")
    assert built.lm_head.weight.equal(original.lm_head.weight.to(torch.bfloat16))


def test_names_that_do_not_agree_are_an_error_unless_told_otherwise(tmp_path):
    model_class, config = families()["BERT"]
    model_class(config).save_pretrained(tmp_path)
    with pytest.raises(
        BuildError, match=r"missing: .*classifier\.bias, classifier\.weight.*unexpected: .*strict=False"
    ):
        memlab.build((hf.BertForSequenceClassification, tmp_path))
    assert memlab.build((hf.BertForSequenceClassification, tmp_path), strict=False).num_labels == 2


def test_a_damaged_folder_is_named(tmp_path):
    model_class, config = families()["Llama"]
    model_class(config).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    save_file({**held, "lm_head.weight": torch.ones(7, 32)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BuildError, match=r"lm_head\.weight is \(7, 32\), not \(200, 32\)"):
        memlab.build(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BuildError, match=r"cannot be built: .*model\.safetensors"):
        memlab.build(tmp_path)


def test_a_folder_of_a_model_that_transformers_does_not_have(tmp_path):
    model_class, config = families()["Llama"]
    model_class(config).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "architectures": ["MyOwn"]}))
    with pytest.raises(BuildError, match="names MyOwn"):
        memlab.build(tmp_path)
    assert type(memlab.build((model_class, tmp_path))) is model_class


def test_what_is_not_enough_or_too_much(tmp_path):
    with pytest.raises(
        BuildError, match=r"GPT2LMHeadModel is not enough: give \(GPT2LMHeadModel, configuration or folder\)"
    ):
        memlab.build(hf.GPT2LMHeadModel)
    with pytest.raises(BuildError, match=r"'gpt2' is not a folder with a config\.json.*snapshot_download"):
        memlab.build("gpt2")
    with pytest.raises(BuildError, match=r"go with a callable; for Transformers, give their folder"):
        memlab.build(families()["Llama"], weights=tmp_path)


def test_without_accelerate_the_cpu_still_works(tmp_path, monkeypatch):
    model_class, config = families()["Llama"]
    model_class(config).save_pretrained(tmp_path)
    monkeypatch.setattr("memlab.building.pretrained.available", lambda package: False)
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: False)
    assert memlab.build(tmp_path, dtype="bf16").dtype == torch.bfloat16


def test_accelerate_is_asked_for_where_it_is_needed(tmp_path, monkeypatch):
    model_class, config = families()["Llama"]
    model_class(config).save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    target = BuildTarget(torch.device("cuda"), None)
    with pytest.raises(MissingExtraError, match="a Transformers folder built on a GPU needs accelerate"):
        pretrained.from_folder(model_class, tmp_path, target, strict=True)
