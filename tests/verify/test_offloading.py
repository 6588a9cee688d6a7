"""A model whose weights stay on disk is the model that is loaded whole, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import disturb_norms, saved, tiny_bert, tiny_llama
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from normswap.errors import CheckpointError, ModelError
from normswap.inputs import make_inputs, run
from normswap.loading import load_model, resolve
from normswap.modules import fused_norms
from normswap.offloading import load_streamed, needs_streaming, stream_of
from normswap.patching import apply_plan
from normswap.plan import make_plan
from normswap.waiting import Waiting


def mixtral() -> PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    return disturb_norms(MixtralForCausalLM(MixtralConfig(**sizes, **heads)))


def gpt2() -> PreTrainedModel:
    return disturb_norms(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)))


def t5() -> PreTrainedModel:
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 2, "d_kv": 16}
    return disturb_norms(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)))


def vit() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return disturb_norms(ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8)))


MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "tied": lambda: tiny_llama(tie_word_embeddings=True),
    "bert": tiny_bert,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "t5": t5,
    "vit": vit,
}


def check_equal(streamed: nn.Module, whole: nn.Module) -> None:
    """Every parameter and buffer is the same, of the same dtype and name."""
    for kind in ("named_parameters", "named_buffers"):
        got, expected = dict(getattr(streamed, kind)()), dict(getattr(whole, kind)())
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert got[name].dtype == tensor.dtype, name
            assert torch.equal(got[name].detach(), tensor.detach()), name


def waiting(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, Waiting)]


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MAKERS)
def test_it_computes_and_holds_what_a_whole_model_does(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = resolve(saved(MAKERS[kind]().to(torch.bfloat16), tmp_path))
    whole = load_model(source, dtype=dtype)
    streamed = load_streamed(source, dtype=dtype, small=0)
    before = waiting(streamed)
    inputs = make_inputs(whole, source.config, sequences=2, length=12)
    for batch in inputs.batches:
        expected, got = run(whole, batch, dtype, "cpu"), run(streamed, batch, dtype, "cpu")
        assert got.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            assert torch.equal(got.tensors[name], tensor), name
    assert len(before) > 10
    # Class tokens and the like belong to no module's forward: they stay once they were read.
    assert set(before) - set(waiting(streamed)) <= {"embeddings.cls_token", "embeddings.position_embeddings"}
    check_equal(streamed, whole)


# transformers reads its own source when it looks for experts, and leaves the file open.
@pytest.mark.filterwarnings("ignore:.*modeling_.*:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.zoo
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llava", "whisper", "mamba", "gemma3n_text"])
def test_architectures_of_the_zoo(tmp_path: Path, zoo: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.syspath_prepend(str(zoo))
    tiny = pytest.importorskip("tiny")
    source = resolve(saved(tiny.perturb_norms_(tiny.tiny_model(kind)), tmp_path))
    whole = load_model(source, dtype=torch.bfloat16)
    streamed = load_streamed(source, dtype=torch.bfloat16, small=0)
    batch = make_inputs(whole, source.config, sequences=1, length=8).batches[0]
    expected, got = (run(model, batch, torch.bfloat16, "cpu").main for model in (whole, streamed))
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    check_equal(streamed, whole)


@pytest.mark.core
def test_a_layer_is_read_when_it_runs_and_let_go_after(tmp_path: Path) -> None:
    source = resolve(saved(tiny_llama(), tmp_path))
    model = load_streamed(source, dtype=torch.float32, small=64)
    assert waiting(model) == [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    there: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def note(_: nn.Module, __: object, name: str = name) -> None:
                there[name] = {one for one, parameter in model.named_parameters() if parameter.dim() > 1} - set(
                    waiting(model)
                )

            module.register_forward_pre_hook(note)
    run(model, {"input_ids": torch.arange(8)[None]}, torch.float32, "cpu")
    assert {name.split(".layers.")[-1][0] for name in there["model.layers.1.mlp.up_proj"]} == {"1"}
    assert there["lm_head"] == {"lm_head.weight"}
    stream = stream_of(model)
    assert stream is not None and [unit.name for unit in stream.units] == [
        *("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head")
    ]
    assert stream.loads == 4


@pytest.mark.core
def test_a_large_layer_is_taken_apart(tmp_path: Path) -> None:
    source = resolve(saved(tiny_llama(), tmp_path))
    model = load_streamed(source, dtype=torch.float32, small=0, unit_bytes=1)
    stream = stream_of(model)
    assert stream is not None and "model.layers.0.mlp.up_proj" in [unit.name for unit in stream.units]
    whole = load_model(source, dtype=torch.float32)
    batch = {"input_ids": torch.arange(8)[None]}
    assert torch.equal(run(model, batch, torch.float32, "cpu").main, run(whole, batch, torch.float32, "cpu").main)


@pytest.mark.core
def test_norms_are_swapped_on_it(tmp_path: Path) -> None:
    source = resolve(saved(tiny_llama(), tmp_path))
    models = [load_streamed(source, dtype=torch.float32, small=0), load_model(source, dtype=torch.float32)]
    for model in models:
        apply_plan(model, make_plan(model), backend="auto", verify=True)
    assert len(list(fused_norms(models[0]))) == 5
    outputs = [run(model, {"input_ids": torch.arange(8)[None]}, torch.float32, "cpu").main for model in models]
    assert torch.equal(*outputs)


@pytest.mark.core
def test_a_parameter_says_what_it_is_without_being_read_and_is_read_by_anything_else(tmp_path: Path) -> None:
    source = resolve(saved(tiny_llama(), tmp_path))
    model, whole = load_streamed(source, dtype=torch.bfloat16, small=0), load_model(source, dtype=torch.bfloat16)
    weight, expected = model.lm_head.weight, whole.lm_head.weight
    assert (weight.shape, weight.dtype, weight.device, weight.numel()) == (
        (64, 32),
        torch.bfloat16,
        expected.device,
        2048,
    )
    assert isinstance(weight, Waiting)
    twin = copy.deepcopy(model.model.layers[0].mlp.up_proj)
    assert type(twin.weight) is nn.Parameter
    assert torch.equal(twin.weight, whole.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(torch.nn.functional.linear(torch.eye(32, dtype=torch.bfloat16), weight), expected.t())
    assert model.lm_head.weight is weight and type(weight) is nn.Parameter


@pytest.mark.core
def test_a_change_is_made_whenever_a_parameter_is_read(tmp_path: Path) -> None:
    source = resolve(saved(tiny_llama(), tmp_path))
    told: list[str] = []

    def change(name: str, values: torch.Tensor) -> torch.Tensor:
        told.append(name)
        return values * 2 if name == "lm_head.weight" else values

    model = load_streamed(source, dtype=torch.float32, change=change)
    whole = load_model(source, dtype=torch.float32)
    batch = {"input_ids": torch.arange(8)[None]}
    expected = 2 * run(whole, batch, torch.float32, "cpu").main
    assert torch.equal(run(model, batch, torch.float32, "cpu").main, expected)
    assert sorted(told) == sorted(name for name, _ in whole.named_parameters())


@pytest.mark.core
def test_a_pickled_checkpoint_is_read_too(tmp_path: Path) -> None:
    folder = saved(tiny_llama(), tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    source = resolve(folder)
    check_equal(load_streamed(source, dtype=torch.bfloat16, small=0), load_model(source, dtype=torch.bfloat16))


@pytest.mark.core
def test_a_missing_tensor_is_told_and_nothing_random_takes_its_place(tmp_path: Path) -> None:
    folder = saved(tiny_llama(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors that its model needs: model\.layers\.1\.mlp\.up_proj"):
        load_streamed(resolve(folder), dtype=torch.float32)


def test_a_missing_pooler_is_as_random_as_in_a_whole_model(tmp_path: Path) -> None:
    from transformers import BertModel

    folder = saved(BertModel(tiny_bert().config), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if "pooler" not in key}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    source = resolve(folder)
    with pytest.warns(UserWarning, match="no weights for its pooler"):
        whole = load_model(source, dtype=torch.float32)
    with pytest.warns(UserWarning, match="no weights for its pooler"):
        streamed = load_streamed(source, dtype=torch.float32, small=0)
    check_equal(streamed, whole)


@pytest.mark.core
def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    source = resolve(saved(tiny_llama(), tmp_path))
    source.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ModelError, match=r"quantized with gptq: its weights cannot be read one by one; load it whole"):
        load_streamed(source, dtype=torch.float32)


@pytest.mark.core
def test_a_file_that_is_cut_short_meanwhile_is_told(tmp_path: Path) -> None:
    folder = saved(tiny_llama(), tmp_path)
    model = load_streamed(resolve(folder), dtype=torch.float32, small=0)
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    with pytest.raises(ModelError, match="CheckpointError"):
        run(model, {"input_ids": torch.arange(8)[None]}, torch.float32, "cpu")


@pytest.mark.core
def test_what_fits_is_told_by_the_headers(tmp_path: Path) -> None:
    source = resolve(saved(tiny_llama().to(torch.bfloat16), tmp_path))
    size = sum(parameter.numel() for parameter in tiny_llama().parameters())
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        least = int(size * dtype.itemsize / 0.7)
        assert needs_streaming(source, dtype, least - 100)
        assert not needs_streaming(source, dtype, least + 100)
    assert not needs_streaming(source, torch.float32)
