"""Finding, building and loading a model: the right class, a quiet console, one line for each mistake."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from normswap import hub
from normswap.errors import CheckpointError, ModelError, NormswapError, UsageError
from normswap.loading import Source, build_meta, load_model, load_tokenizer, model_class, resolve

# Torch lists its factory functions once, at the first device context: not while a fixture has replaced some of them.
with torch.device("meta"):
    torch.empty(0)

# A class that transformers does not export.
TOWER = "Qwen2VisionTransformerPretrainedModel"
REMOTE_CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

print("code of the checkpoint ran")

class MineConfig(PretrainedConfig):
    model_type = "mine_of_the_tests"
    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class MineForCausalLM(PreTrainedModel):
    config_class = MineConfig
    def __init__(self, config):
        super().__init__(config)
        steps = torch.linspace(0, 1, 3).tolist()
        self.linear = nn.Linear(config.width, len(steps))
        self.post_init()
    def _init_weights(self, module):
        pass
"""


def llama_config(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaConfig(**{**sizes, "num_attention_heads": 2, "num_key_value_heads": 2, **changes})


def bert_config() -> BertConfig:
    return BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config()).save_pretrained(place / "llama", max_shard_size="20KB")
    BertModel(bert_config()).save_pretrained(place / "bert")
    return place


@pytest.fixture
def llama(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "llama", tmp_path / "llama"))


@pytest.fixture
def bert(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "bert", tmp_path / "bert"))


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "remote"
    path.mkdir()
    (path / "modeling_mine.py").write_text(REMOTE_CODE)
    auto_map = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    config = {"model_type": "mine_of_the_tests", "architectures": ["MineForCausalLM"], "auto_map": auto_map}
    (path / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": torch.ones(3, 8), "linear.bias": torch.ones(3)}, path / "model.safetensors")
    return path


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def edit_bert_weights(path: Path, drop: str = "", **changes: torch.Tensor) -> None:
    weights = load_file(path / "model.safetensors")
    kept = {key: value for key, value in weights.items() if not drop or drop not in key}
    save_file({**kept, **changes}, path / "model.safetensors", metadata={"format": "pt"})


def refusal(kind: type[NormswapError], path: Path | str, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load_model(resolve(path, **options), dtype=torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_is_found_built_and_loaded_in_silence(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = resolve(llama)
    assert (source.name, source.path, source.revision) == (str(llama), llama, None)
    assert model_class(source) is LlamaForCausalLM
    meta = build_meta(source)
    assert not meta.training and {value.device.type for value in meta.parameters()} == {"meta"}
    model = load_model(source, dtype=torch.bfloat16)
    assert not model.training and {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert list(meta.state_dict()) == list(model.state_dict())
    assert load_tokenizer(source) is None
    assert capfd.readouterr() == ("", "")


def test_the_given_names_are_understood(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("llama").path == Path("llama")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/llama").path == llama
    with pytest.raises(UsageError, match="expected a Hub id with a revision, got the folder"):
        resolve(llama, revision="main")
    for name in ("./absent", "/absent", "a/b/c", tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=r"expected a model folder or a Hub id, got '.*': no such folder$"):
            resolve(name)
    with pytest.raises(CheckpointError, match="expected the folder of a checkpoint, got the file"):
        resolve(llama / "config.json")


def test_a_model_in_the_hub_cache_is_found_offline(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, repository = "0123456789" * 4, tmp_path / "cache" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(llama, repository / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    source = resolve("some/model", weights=False)
    assert source == resolve("some/model") and source.revision == commit and source.path.name == commit
    assert isinstance(load_model(source, dtype=torch.float32), LlamaForCausalLM)
    with pytest.raises(CheckpointError, match="got 'some/other': no such folder and not reachable on the Hub"):
        resolve("some/other")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("RepositoryNotFoundError", "no such folder, and the Hub has no such model"),
        ("GatedRepoError", "is gated: ask for access on its page"),
        ("RevisionNotFoundError", "has no revision 'v9'"),
        ("LocalEntryNotFoundError", "not reachable on the Hub"),
    ],
)
def test_what_the_hub_answers_is_told(monkeypatch: pytest.MonkeyPatch, error: str, words: str) -> None:
    kind = getattr(huggingface_hub.errors, error)

    def refuse(*_: Any, **__: Any) -> None:
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(hub, "_ignored", lambda *_: [])
    with pytest.raises(CheckpointError, match=words):
        resolve("some/model", revision="v9")


def test_a_folder_that_holds_no_model_is_told(tmp_path: Path) -> None:
    assert "expected config.json in" in refusal(CheckpointError, tmp_path)
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text("{}")
    assert "give the sub-folder that holds the model (text_encoder)" in refusal(CheckpointError, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "this is an adapter: merge it" in refusal(CheckpointError, tmp_path)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("{", CheckpointError, "expected JSON in"),
        ("\udcff", CheckpointError, "expected JSON in"),
        ("[]", CheckpointError, "expected a JSON object in"),
        ("{}", CheckpointError, "expected a model_type in"),
        ('{"model_type": "llamma"}', ModelError, "does not know the model type 'llamma' of"),
        ('{"model_type": ["llama"]}', ModelError, "does not know the model type ['llama'] of"),
        ('{"model_type": "llama", "hidden_size": "x"}', ModelError, ""),
        ('{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 0}', ModelError, ""),
    ],
)
def test_a_bad_config_is_told(tmp_path: Path, text: str, kind: type[NormswapError], words: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(kind) as caught:
        build_meta(resolve(tmp_path))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    if "does not know" in words:
        assert "upgrade transformers, or pass --trust-remote-code" in str(caught.value)


def test_missing_tensors_are_an_error(bert: Path) -> None:
    edit_bert_weights(bert, drop="layer.1.output.LayerNorm")
    message = refusal(CheckpointError, bert)
    assert "lacks 2 tensors that its model needs: encoder.layer.1.output.LayerNorm." in message


def test_a_missing_pooler_is_a_warning(bert: Path) -> None:
    edit_bert_weights(bert, drop="pooler")
    with pytest.warns(UserWarning, match=r"has no weights for its pooler \(pooler.dense.bias, pooler.dense.weight\)"):
        load_model(resolve(bert), dtype=torch.float32)


def test_other_shapes_are_an_error(bert: Path) -> None:
    edit_bert_weights(bert, **{"embeddings.LayerNorm.weight": torch.ones(31)})
    message = refusal(CheckpointError, bert)
    assert "config gives: embeddings.LayerNorm.weight" in message and "belong to different models" in message
    if transformers.__version__ >= "5":
        assert "embeddings.LayerNorm.weight has (31,), expected (32,)" in message


def test_tensors_that_the_model_does_not_use_are_fine(bert: Path) -> None:
    edit_bert_weights(bert, extra=torch.ones(3))
    load_model(resolve(bert), dtype=torch.float32)


def test_a_truncated_shard_is_told(llama: Path) -> None:
    shard = sorted(llama.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert refusal(CheckpointError, llama).endswith("; fetch the checkpoint again")
    shard.unlink()
    assert "cannot load" in refusal(CheckpointError, llama)


def test_a_quantized_checkpoint_without_its_library_is_told(llama: Path) -> None:
    edit_config(llama, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    assert "which is quantized with gptq" in refusal(ModelError, llama)
    assert isinstance(build_meta(resolve(llama)), LlamaForCausalLM)


def test_code_of_the_checkpoint_runs_only_when_trusted(remote: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"defined by Python code in the checkpoint; .* --trust-remote-code"):
        resolve(remote)
    assert not list(remote.glob("__pycache__")) and capfd.readouterr() == ("", "")
    source = resolve(remote, trust_remote_code=True)
    assert model_class(source).__name__ == "MineForCausalLM"
    assert {value.device.type for value in build_meta(source).parameters()} == {"meta"}
    assert torch.equal(load_model(source, dtype=torch.float32).linear.weight, torch.ones(3, 8))
    assert capfd.readouterr().out == "" and not list(remote.glob("__pycache__"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (llama_config(), "LlamaForCausalLM"),
        (bert_config(), "BertForMaskedLM"),
        (transformers.T5Config(), "T5ForConditionalGeneration"),
        (transformers.WhisperConfig(), "WhisperForConditionalGeneration"),
        (transformers.ViTConfig(), "ViTForMaskedImageModeling"),
        (llama_config(architectures=["LLaMAForCausalLM"]), "LlamaForCausalLM"),
        (llama_config(architectures=["LlamaModel"]), "LlamaModel"),
        (llama_config(architectures=["AutoConfig"]), "LlamaForCausalLM"),
        (transformers.Qwen2VLConfig(architectures=[TOWER]), TOWER),
    ],
)
def test_the_class_is_the_named_one_or_the_most_specific(config: Any, expected: str) -> None:
    assert model_class(Source("x", Path(), None, config, False)).__name__ == expected


@pytest.mark.parametrize("name", ["Wav2Vec2", "XLNet"])
def test_what_a_model_makes_off_the_meta_device_is_moved(name: str) -> None:
    config = getattr(transformers, f"{name}Config")()
    model = build_meta(Source("x", Path(), None, config, False))
    assert {value.device.type for value in (*model.parameters(), *model.buffers())} == {"meta"}


def test_a_very_large_model_is_built_from_its_config_alone() -> None:
    config = llama_config(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, vocab_size=128256)
    model = build_meta(Source("x", Path(), None, config, False))
    assert sum(value.numel() for value in model.parameters()) > 60e9


def test_a_tokenizer_is_loaded_or_its_trouble_told(llama: Path) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {"[UNK]": 0, "a": 1, "b": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(llama / "tokenizer.json"))
    (llama / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert load_tokenizer(resolve(llama))("a")["input_ids"] == [1]
    (llama / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load the tokenizer of"):
        load_tokenizer(resolve(llama))


@pytest.mark.core
def test_a_tokenizer_class_of_a_later_transformers_is_read_from_its_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    vocabulary = {"<unk>": 0, "once": 1, "upon": 2}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizerOfTomorrow"}')
    assert load_tokenizer(resolve(tmp_path))("once upon")["input_ids"] == [1, 2]
