"""The swap contract: only the forward changes, and unpatch puts back exactly what was there."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from pathlib import Path

import handwritten as hw
import pytest
import torch
from tiny_checkpoints import tiny_llama
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normswap
from normswap import execution, modules
from normswap.errors import BackendError, NothingToPatchError, ParityError, UsageError

pytestmark = pytest.mark.core


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return tiny_llama()


IDS = torch.arange(20).reshape(2, 10)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def count_original_calls(monkeypatch: pytest.MonkeyPatch, cls: type[nn.Module]) -> list[str]:
    calls: list[str] = []
    forward = cls.forward

    @functools.wraps(forward)
    def counted(self: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(type(self).__name__)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", counted)
    return calls


def test_returns_the_same_model_and_the_same_parameters_under_the_same_keys(llama: LlamaForCausalLM) -> None:
    before = dict(llama.named_parameters())
    keys = list(llama.state_dict())
    assert normswap.patch(llama) is llama
    assert list(llama.state_dict()) == keys
    assert all(parameter is before[name] for name, parameter in llama.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computes_what_the_original_computes(llama: LlamaForCausalLM, dtype: torch.dtype) -> None:
    llama.to(dtype)
    expected = logits(llama)
    normswap.patch(llama)
    assert len(list(modules.fused_norms(llama))) == 5
    assert torch.equal(logits(llama), expected)


def test_no_original_forward_runs_after_the_patch_and_all_do_after_unpatch(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_original_calls(monkeypatch, LlamaRMSNorm)
    logits(llama)
    assert len(calls) == 5
    normswap.patch(llama)
    calls.clear()
    logits(llama)
    assert calls == []
    normswap.unpatch(llama)
    logits(llama)
    assert len(calls) == 5


def test_is_still_an_instance_of_its_class_with_its_attributes_and_words(llama: LlamaForCausalLM) -> None:
    norm = llama.model.norm
    attributes = set(vars(norm))
    normswap.patch(llama)
    assert isinstance(norm, LlamaRMSNorm)
    assert type(norm).__name__ == "LlamaRMSNorm"
    assert type(norm).__module__ == LlamaRMSNorm.__module__
    assert norm.variance_epsilon == llama.config.rms_norm_eps
    assert repr(norm) == "LlamaRMSNorm((32,), eps=1e-06, normswap='auto')"
    assert set(vars(norm)) - attributes == {"_normswap"}


def test_unpatch_puts_back_exactly_what_was_there(llama: LlamaForCausalLM) -> None:
    before = [(type(module), dict(vars(module))) for module in llama.modules()]
    normswap.unpatch(normswap.patch(llama))
    assert [(type(module), dict(vars(module))) for module in llama.modules()] == before
    assert normswap.unpatch(llama) is llama


def test_patching_twice_is_harmless(llama: LlamaForCausalLM) -> None:
    expected = logits(normswap.patch(llama))
    kinds = [type(module) for module in llama.modules()]
    normswap.patch(llama)
    assert [type(module) for module in llama.modules()] == kinds
    assert torch.equal(logits(llama), expected)
    normswap.unpatch(llama)
    assert type(llama.model.norm) is LlamaRMSNorm


def test_two_models_do_not_share_the_patch(llama: LlamaForCausalLM) -> None:
    other = tiny_llama()
    normswap.patch(llama)
    assert type(other.model.norm) is LlamaRMSNorm
    assert type(nn.LayerNorm(4)) is nn.LayerNorm


def test_a_shared_norm_stays_shared() -> None:
    norm = nn.LayerNorm(8)
    model = nn.ModuleList([norm, nn.Linear(8, 8), norm])
    normswap.patch(model)
    assert model[0] is model[2] is norm
    assert [name for name, _, _ in modules.fused_norms(model)] == ["0"]
    assert normswap.inspect(model).plan.swaps[0].name == "0"


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_and_pickles(llama: LlamaForCausalLM, how: str) -> None:
    expected = logits(normswap.patch(llama))
    if how == "deepcopy":
        copied = copy.deepcopy(llama)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(llama))
    else:
        buffer = io.BytesIO()
        torch.save(llama, buffer)
        copied = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert type(copied.model.norm) is type(llama.model.norm)
    assert copied.model.norm.weight is not llama.model.norm.weight
    assert torch.equal(logits(copied), expected)
    normswap.unpatch(copied)
    assert type(copied.model.norm) is LlamaRMSNorm
    assert isinstance(llama.model.norm, modules.FusedNorm)


def test_save_pretrained_writes_what_it_wrote_before(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    llama.save_pretrained(f"{tmp_path}/before")
    normswap.patch(llama).save_pretrained(f"{tmp_path}/after")
    before, after = (tmp_path / name / "model.safetensors" for name in ("before", "after"))
    assert before.read_bytes() == after.read_bytes()
    again = LlamaForCausalLM.from_pretrained(f"{tmp_path}/after")
    assert torch.equal(logits(again), logits(llama))


def test_half_and_to_follow_the_original(llama: LlamaForCausalLM) -> None:
    expected = logits(copy.deepcopy(llama).half())
    assert torch.equal(logits(normswap.patch(llama).half()), expected)
    wide = copy.deepcopy(llama).double()
    assert torch.equal(logits(wide), logits(normswap.unpatch(wide)))


def test_mixed_dtypes_give_the_dtype_that_the_class_gives() -> None:
    x = torch.randn(4, 32).bfloat16()
    for cls in (LlamaRMSNorm, nn.LayerNorm, hw.LlamaRMSNorm, hw.Scale):
        norm = cls(32)
        expected = norm(x)
        got = normswap.patch(nn.Sequential(norm))[0](x)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_forward_hooks_fire_with_the_same_tensors(llama: LlamaForCausalLM) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    llama.model.norm.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    logits(llama)
    logits(normswap.patch(llama))
    assert len(seen) == 2
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])


@pytest.mark.parametrize("order", ["patch first", "hooks first"])
def test_accelerate_hooks_survive_patch_and_unpatch(llama: LlamaForCausalLM, order: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    calls = []

    class Recorder(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
            calls.append(isinstance(module, modules.FusedNorm))
            return args, kwargs

    expected = logits(llama)
    if order == "patch first":
        normswap.patch(llama)
    hooks.add_hook_to_module(llama.model.norm, Recorder())
    if order == "hooks first":
        normswap.patch(llama)
    assert torch.equal(logits(llama), expected)
    normswap.unpatch(llama)
    assert torch.equal(logits(llama), expected)
    assert calls == [True, False]
    hooks.remove_hook_from_module(llama.model.norm)
    assert type(llama.model.norm) is LlamaRMSNorm
    assert torch.equal(logits(llama), expected)


def test_the_hooked_original_does_not_run_behind_the_hook(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    calls = count_original_calls(monkeypatch, LlamaRMSNorm)
    hooks.add_hook_to_module(llama.model.norm, hooks.ModelHook())
    normswap.patch(llama)
    calls.clear()
    logits(llama)
    assert calls == []


def test_trains_to_the_same_gradients(llama: LlamaForCausalLM) -> None:
    def gradients() -> dict[str, torch.Tensor]:
        llama.zero_grad()
        llama(input_ids=IDS, labels=IDS).loss.backward()
        return {name: p.grad.clone() for name, p in llama.named_parameters() if p.grad is not None}

    llama.train()
    expected = gradients()
    normswap.patch(llama)
    got = gradients()
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)


def test_frozen_gains_stay_frozen(llama: LlamaForCausalLM) -> None:
    llama.model.norm.weight.requires_grad_(False)
    normswap.patch(llama).train()
    llama(input_ids=IDS, labels=IDS).loss.backward()
    assert llama.model.norm.weight.grad is None
    assert llama.model.layers[0].input_layernorm.weight.grad is not None


def test_compiles_to_one_graph(llama: LlamaForCausalLM) -> None:
    expected = logits(llama)
    compiled = torch.compile(normswap.patch(llama), fullgraph=True)
    torch.testing.assert_close(logits(compiled), expected, rtol=1e-4, atol=1e-4)


def test_the_inputs_name_still_works_and_wrong_arguments_fail_as_before() -> None:
    norm = LlamaRMSNorm(8)
    x = torch.randn(2, 8)
    expected = norm(hidden_states=x)
    normswap.patch(nn.Sequential(norm))
    assert torch.equal(norm(hidden_states=x), expected)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        norm(y=x)
    with pytest.raises(TypeError, match="positional argument"):
        norm(x, x)


def test_include_and_exclude_select_by_name(llama: LlamaForCausalLM) -> None:
    normswap.patch(llama, include="*post_attention_layernorm", exclude=["*.1.*"])
    assert [name for name, _, _ in modules.fused_norms(llama)] == ["model.layers.0.post_attention_layernorm"]


def test_an_include_that_matches_nothing_is_an_error_and_an_exclude_warns(llama: LlamaForCausalLM) -> None:
    with pytest.raises(UsageError, match=r"include pattern '\*ln_f' matches no norm; their names are like model"):
        normswap.patch(llama, include="*ln_f")
    with pytest.warns(UserWarning, match=r"exclude pattern '\*ln_f' matches no norm"):
        normswap.patch(llama, exclude="*ln_f")


def test_a_model_with_nothing_to_swap_is_an_error_with_the_reasons() -> None:
    with pytest.raises(NothingToPatchError, match="at least one RMSNorm or LayerNorm, found none"):
        normswap.patch(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(NothingToPatchError, match=r"found none \(1 modules .* GroupNorm normalises over channels"):
        normswap.patch(nn.Sequential(nn.GroupNorm(2, 4)))


def test_a_backend_that_cannot_run_here_is_an_error_and_changes_nothing(llama: LlamaForCausalLM) -> None:
    with pytest.raises(BackendError, match="triton"):
        normswap.patch(llama, backend="triton")
    with pytest.raises(BackendError, match="turbo"):
        normswap.patch(llama, backend="turbo")
    assert type(llama.model.norm) is LlamaRMSNorm


def test_a_wrong_kernel_is_caught_on_the_spot_and_nothing_is_changed(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = execution._OPERATIONS["rms"]

    def wrong(*args: object, eps: float, **kwargs: object) -> torch.Tensor:
        return right(*args, eps=10 * eps, **kwargs)

    monkeypatch.setitem(execution._OPERATIONS, "rms", wrong)
    with pytest.raises(ParityError, match=r"model\.layers\.0\.input_layernorm \(LlamaRMSNorm\).*nothing was changed"):
        normswap.patch(llama)
    assert not list(modules.fused_norms(llama))
    normswap.patch(llama, verify=False)
    assert len(list(modules.fused_norms(llama))) == 5


def test_patches_a_meta_model_and_serves_it_once_it_has_weights(llama: LlamaForCausalLM) -> None:
    with torch.device("meta"):
        empty = LlamaForCausalLM(llama.config)
    normswap.patch(empty)
    assert empty.model.norm.weight.is_meta
    empty.load_state_dict(llama.state_dict(), assign=True)
    empty.model.rotary_emb = llama.model.rotary_emb
    assert torch.equal(logits(empty.eval()), logits(llama))


def test_a_class_changed_by_something_else_is_not_undone_blindly() -> None:
    model = normswap.patch(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)))
    wrapped = type("WrappedLayerNorm", (type(model[1]),), {})
    model[1].__class__ = wrapped
    for change in (normswap.unpatch, normswap.patch):
        with pytest.raises(normswap.NormswapError, match="whose class became WrappedLayerNorm"):
            change(model)
        assert type(model[1]) is wrapped
        assert isinstance(model[0], modules.FusedNorm)


def test_an_empty_batch_passes_through() -> None:
    model = normswap.patch(nn.Sequential(nn.LayerNorm(8)))
    assert model(torch.empty(0, 3, 8)).shape == (0, 3, 8)


@pytest.mark.parametrize("norm", [LlamaRMSNorm(8), nn.LayerNorm(8)], ids=["rms", "layer"])
def test_function_transforms_see_the_original(norm: nn.Module) -> None:
    x, v = torch.randn(3, 8), torch.randn(3, 8)

    def transforms() -> list[torch.Tensor]:
        return [
            torch.func.jvp(norm, (x,), (v,))[1],
            torch.func.jacrev(norm)(x[0]),
            torch.func.jacfwd(norm)(x[0]),
            torch.func.vmap(norm)(x),
            torch.func.vmap(torch.func.grad(lambda row: norm(row).sum()))(x),
        ]

    expected = transforms()
    assert float(expected[0].detach().norm()) > 0.1
    normswap.patch(nn.Sequential(norm))
    for got, wanted in zip(transforms(), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("rows", [1, 300])
def test_a_kernel_that_is_wrong_for_some_number_of_rows_is_caught(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    right = execution._OPERATIONS["layer"]

    def wrong(x: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        return right(x, *args, **options) * (1.5 if x.numel() // x.shape[-1] == rows else 1.0)

    monkeypatch.setitem(execution._OPERATIONS, "layer", wrong)
    with pytest.raises(ParityError, match="within the unit bound"):
        normswap.patch(nn.Sequential(nn.LayerNorm(32)))


def test_the_modules_own_parameters_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    right = execution._OPERATIONS["layer"]

    def wrong(x: torch.Tensor, weight: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        return right(x, weight.clamp(max=5000.0), *args, **options)

    monkeypatch.setitem(execution._OPERATIONS, "layer", wrong)
    norm = nn.LayerNorm(32)
    normswap.unpatch(normswap.patch(nn.Sequential(norm)))
    nn.init.constant_(norm.weight, 6000.0)
    with pytest.raises(ParityError, match="within the unit bound"):
        normswap.patch(nn.Sequential(norm))


def test_patches_inside_inference_mode_and_models_born_there() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.LayerNorm(8))
        x = torch.randn(3, 8)
        expected = model(x)
        assert torch.equal(normswap.patch(model)(x), expected)
    with torch.no_grad():
        assert torch.equal(normswap.patch(normswap.unpatch(model))(x), expected)
