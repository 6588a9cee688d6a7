"""The build for the Hub, loaded by Hugging Face ``kernels`` from a folder: no network."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import normswap_kernels
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

ROOT = Path(__file__).resolve().parent.parent.parent
TOOL = ROOT / "tools" / "build_kernels.py"
OLDEST = (0, 14)
BF16 = torch.bfloat16

# Layer, module and class of the original, whether its forward takes a gate.
ORIGINALS = [
    ("RMSNorm", "llama", "LlamaRMSNorm", False),
    ("RMSNormGainFirst", "olmo2", "Olmo2RMSNorm", False),
    ("RMSNormZeroCentered", "qwen3_5", "Qwen3_5RMSNorm", False),
    ("RMSNormGated", "qwen3_next", "Qwen3NextRMSNormGated", True),
    ("RMSNormGatedGainFirst", "kimi_linear", "KimiLinearRMSNormGated", True),
]


def build(output: Path) -> list[Path]:
    done = subprocess.run([sys.executable, TOOL, "--output", output], capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a repository as the Hub would hold it."""
    output = tmp_path_factory.mktemp("hub")
    build(output)
    return output


@pytest.fixture(scope="module")
def loader() -> ModuleType:
    """Hugging Face ``kernels``."""
    try:
        # Not by import: in the root of the repository a folder bears the package's name.
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the package kernels, which is not installed")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        pytest.skip(f"needs kernels {'.'.join(map(str, OLDEST))} or later, which reads metadata.json, got {version}")
    return importlib.import_module("kernels")


@pytest.fixture(scope="module")
def loaded(built: Path, loader: ModuleType) -> ModuleType:
    """The package as the loader gives it, under a name of its own."""
    module: ModuleType = loader.get_local_kernel(built)
    assert Path(str(module.__file__)).is_relative_to(built) and module.__name__ != normswap_kernels.__name__
    return module


@pytest.fixture
def tagged(loader: ModuleType) -> Iterator[Callable[[type[nn.Module], str], None]]:
    """Tag a class with the name of a layer, as transformers does where it accepts the version of ``kernels``."""
    before: list[tuple[type[nn.Module], dict[str, Any]]] = []
    names = ("kernel_layer_name", "kernel_condition")

    def tag(cls: type[nn.Module], name: str) -> None:
        before.append((cls, {name: vars(cls)[name] for name in names if name in vars(cls)}))
        loader.replace_kernel_forward_from_hub(cls, name)

    yield tag
    for cls, attributes in reversed(before):
        for name in names:
            if name in attributes:
                setattr(cls, name, attributes[name])
            elif name in vars(cls):
                delattr(cls, name)


def kernelize(loader: ModuleType, model: nn.Module, built: Path, *layers: str, mode: Any = None) -> None:
    mapping = {name: {"cpu": loader.LocalLayerRepository(built, layer_name=name)} for name in layers}
    with loader.use_kernel_mapping(mapping, inherit_mapping=False):
        loader.kernelize(model, mode=mode or loader.Mode.INFERENCE, device="cpu", use_fallback=False)


@pytest.fixture
def counted(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many times each operation of the loaded package was called by one of its layers."""
    calls: Counter[str] = Counter()

    def counting(name: str, operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            calls[name] += 1
            return operation(*args, **options)

        return call

    for name in ("rms_norm", "gated_rms_norm", "layer_norm"):
        monkeypatch.setattr(loaded.layers, name, counting(name, getattr(loaded.layers, name)))
    return calls


def test_a_variant_for_each_backend_the_same_at_each_build(built: Path, tmp_path: Path) -> None:
    variants = build(tmp_path)
    assert [v.name for v in variants] == ["torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu"]
    identifiers = set()
    for variant in variants:
        metadata = json.loads((variant / "metadata.json").read_text())
        assert variant.name == f"torch-{metadata['backend']['type']}" and metadata["id"].isidentifier()
        identifiers.add(metadata["id"])
        files = {path.relative_to(variant) for path in variant.rglob("*") if path.is_file()}
        assert all(
            (variant / file).read_bytes() == (built / "build" / variant.name / file).read_bytes() for file in files
        )
        package = Path(str(normswap_kernels.__file__)).parent
        wanted = {p.relative_to(package) for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
        assert files == wanted | {Path("metadata.json"), Path("_ops.py")}
    assert len(identifiers) == len(variants)


def test_a_second_build_replaces_the_first(tmp_path: Path) -> None:
    stale = build(tmp_path)[0] / "stale.py"
    stale.write_text("")
    build(tmp_path)
    assert not stale.exists() and {path.name for path in (tmp_path / "build").iterdir()} == {
        f"torch-{backend}" for backend in ("cpu", "cuda", "rocm", "xpu")
    }


def test_the_loader_accepts_project_and_metadata(built: Path, loader: ModuleType) -> None:
    native = pytest.importorskip("kernels._rust", reason="needs kernels 0.17 or later, which checks build.toml")
    backends = native.Build.open(ROOT / "kernels").general.backends
    assert len(backends) == 4
    for variant in (built / "build").iterdir():
        metadata = loader.Metadata.read_from_file(variant / "metadata.json")
        assert metadata.name.python_name == "normswap_kernels" and metadata.backend.backend_type in backends
        metadata.digest.validate(native.Digest.hash_variant(native.DigestAlgorithm.SHA256, variant))


def test_functions_give_what_the_installed_package_gives(loaded: ModuleType) -> None:
    assert loaded.__all__ == normswap_kernels.__all__
    x, residual, gate = (torch.randn(5, 96).to(BF16) for _ in range(3))
    weight, bias = torch.randn(96).to(BF16), torch.randn(96).to(BF16)
    calls: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, weight),
        "layer_norm": (x, weight, bias),
        "add_rms_norm": (x, residual, weight),
        "add_layer_norm": (x, residual, weight, bias),
        "gated_rms_norm": (x, gate, weight),
        "rms_norm_quant": (x, weight),
    }
    for name, arguments in calls.items():
        ours = getattr(normswap_kernels, name)(*arguments, eps=1e-6)
        theirs = getattr(loaded, name)(*arguments, eps=1e-6)
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0)


def test_operations_live_beside_those_of_the_installed_package(loaded: ModuleType) -> None:
    ours, theirs = torch.ops.normswap, getattr(torch.ops, loaded.__name__)
    assert ours.rms_norm is not theirs.rms_norm
    x = torch.randn(3, 64, requires_grad=True)

    def both(x: Tensor) -> Tensor:
        return loaded.rms_norm(x, eps=1e-6) + normswap_kernels.rms_norm(x, eps=1e-6)

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(both, fullgraph=True, backend=keep)(x)
    assert torch.equal(compiled, both(x))
    namespaces = {str(node.target).partition(".")[0] for node in graphs[0].graph.nodes if node.op == "call_function"}
    assert {"normswap", loaded.__name__} <= namespaces


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, BF16), ids=str)
@pytest.mark.parametrize(("layer", "module", "name", "gated"), ORIGINALS, ids=[case[2] for case in ORIGINALS])
def test_layers_give_what_the_classes_of_transformers_give(
    built: Path,
    loader: ModuleType,
    counted: Counter[str],
    tagged: Callable[..., None],
    layer: str,
    module: str,
    name: str,
    gated: bool,
    dtype: torch.dtype,
) -> None:
    cls = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    norm = cls(192).to(dtype)
    nn.init.normal_(norm.weight)
    inputs = [torch.randn(64, 192).to(dtype) for _ in range(1 + gated)]
    with torch.no_grad():
        expected = norm(*inputs)
        tagged(cls, layer)
        kernelize(loader, norm, built, layer)
        result = norm(*inputs)
    assert counted == {"gated_rms_norm" if gated else "rms_norm": 1}
    assert result.dtype == expected.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
        return
    unit = torch.finfo(dtype).eps
    assert ((result.float() - expected.float()).abs() <= 2 * unit * expected.float().abs()).all()
    assert (result != expected).float().mean() < (1e-4 if dtype == BF16 else 1e-3)


def test_layer_norm_layer(built: Path, loader: ModuleType, counted: Counter[str], tagged: Callable[..., None]) -> None:
    norm = nn.LayerNorm(96)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(7, 96)
    expected = norm(x)
    tagged(nn.LayerNorm, "LayerNorm")
    kernelize(loader, norm, built, "LayerNorm")
    torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)
    assert counted == {"layer_norm": 1}


def test_every_layer_may_be_compiled_and_trained(loaded: ModuleType) -> None:
    layers = {name for name, value in vars(loaded.layers).items() if isinstance(value, type)}
    assert layers == {case[0] for case in ORIGINALS} | {"LayerNorm"}
    for name in layers:
        layer = getattr(loaded.layers, name)
        assert layer.can_torch_compile and layer.has_backward


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
def test_a_kernelized_llama_runs_and_trains_on_our_norms(
    built: Path,
    loader: ModuleType,
    counted: Counter[str],
    tagged: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(dtype)
    norms = [module for module in model.modules() if isinstance(module, LlamaRMSNorm)]
    for norm in norms:
        nn.init.normal_(norm.weight)
    ids = torch.randint(0, 64, (2, 9))
    expected = model(ids, labels=ids)
    expected.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    tagged(LlamaRMSNorm, "RMSNorm")
    kernelize(loader, model, built, "RMSNorm", mode=loader.Mode.TRAINING | loader.Mode.TORCH_COMPILE)

    def gone(*_: Any) -> None:
        raise AssertionError("the original forward ran")

    monkeypatch.setattr(LlamaRMSNorm, "forward", gone)
    result = model(ids, labels=ids)
    result.loss.backward()
    assert counted == {"rms_norm": len(norms)} and len(norms) == 5
    # On the CPU our RMSNorm has the bits of the eager class.
    assert torch.equal(result.logits, expected.logits)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, gradients[name], rtol=0, atol=tolerance * float(gradients[name].abs().max()))
