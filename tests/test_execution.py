"""What a swapped norm runs for the arguments, dtypes and modes at hand."""

from __future__ import annotations

import pickle
import warnings

import handwritten as hw
import handwritten_kinds as hk
import pytest
import torch
from torch import nn

import normswap
from normswap import modules

pytestmark = pytest.mark.core


def swapped(norm: nn.Module) -> nn.Module:
    """Draw the norm's parameters and swap it."""
    with torch.no_grad():
        for tensor in (*norm.parameters(), *norm.buffers()):
            tensor.normal_(1.0, 0.5)
    return normswap.patch(norm)


def originals(norm: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Note the dtype of each input that the original's own code is given from here on."""
    cls = modules.execution_of(norm).original
    forward, calls = cls.forward, []
    monkeypatch.setattr(
        cls,
        "forward",
        lambda self, x, *a, **k: calls.append(x.dtype) or forward(self, x, *a, **k),  # type: ignore
    )
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_result_that_autocast_widens_is_widened(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = swapped(hk.WideningNorm())
    x = torch.randn(5, 64).to(dtype)
    calls = originals(norm, monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        got, again = norm(x), norm(2 * x)
        # Once, to see what it does.
        assert calls == [dtype]
        expected = modules.original_forward(norm, x)
    assert got.dtype == again.dtype == torch.float32
    torch.testing.assert_close(got, expected)
    calls.clear()
    assert norm(x).dtype == dtype and calls == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_autocast_narrows_on_the_way_is_left_to_the_original(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = swapped(hk.NarrowingNorm())
    x = torch.randn(5, 64).to(dtype)
    calls = originals(norm, monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        got = norm(x)
        assert calls == [dtype, dtype]
        assert got.dtype == torch.bfloat16 and torch.equal(got, modules.original_forward(norm, x))
        assert norm(x[:0]).shape == (0, 64)
    calls.clear()
    assert norm(x).dtype == dtype and calls == []


def test_its_own_code_runs_in_dtypes_that_no_formula_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = swapped(hw.NarrowNorm())
    calls = originals(norm, monkeypatch)
    norm(torch.randn(3, 64))
    assert calls == []
    norm.bfloat16()
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(norm(x), modules.original_forward(norm, x))
    assert calls == [torch.bfloat16] * 2


@pytest.mark.parametrize("by", ["position", "name", "both"])
@pytest.mark.parametrize("cls", [hk.GateBeforeNorm, hk.GateFirstNorm, hk.HiddenGateNorm])
def test_gates_are_found_by_position_and_by_name(
    cls: type[nn.Module], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = swapped(cls())
    names = ["x", "z"] if cls is hk.GateBeforeNorm else ["x", "gate"]
    given = dict(zip(names, torch.randn(2, 3, 64).unbind(0), strict=True))
    order = names[::-1] if cls is hk.GateFirstNorm else names
    args = [given[name] for name in order]
    expected = modules.original_forward(norm, *args)
    calls = originals(norm, monkeypatch)
    if by == "position":
        got = norm(*args)
    elif by == "name":
        got = norm(**given)
    else:
        got = norm(args[0], **{order[1]: args[1]})
    assert calls == []
    torch.testing.assert_close(got, expected)


def test_what_is_no_tensor_fails_as_before() -> None:
    norm = swapped(hw.Scale(4))
    for wrong in ([1.0, 2.0], None, 3):
        with pytest.raises((AttributeError, TypeError)) as wanted:
            modules.original_forward(norm, wrong)
        with pytest.raises(type(wanted.value)) as found:
            norm(wrong)
        assert str(found.value) == str(wanted.value)


def test_a_gate_of_another_dtype_goes_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = swapped(hk.GateBeforeNorm())
    calls = originals(norm, monkeypatch)
    norm(torch.randn(3, 64), torch.randn(3, 64, dtype=torch.float64))
    assert len(calls) == 1


def test_a_gate_of_another_shape_goes_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = swapped(hk.GateBeforeNorm())
    calls = originals(norm, monkeypatch)
    x, gate = torch.randn(3, 64), torch.randn(64)
    assert norm(x, gate).shape == (3, 64) and len(calls) == 1
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'z'"):
        norm(x)


def test_heads_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = swapped(hk.JoiningNorm()), torch.randn(2, 5, 4, 16)
    expected = modules.original_forward(norm, x)
    calls = originals(norm, monkeypatch)
    got = norm(x)
    assert calls == [] and got.shape == (2, 5, 64)
    torch.testing.assert_close(got, expected)


def test_what_follows_the_norm_goes_on_running() -> None:
    norm, x = swapped(hk.ActingNorm()), torch.randn(3, 64)
    seen: list[str] = []
    for name in ("drop", "act"):
        norm.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    torch.manual_seed(1)
    got = norm(x)
    assert seen == ["drop", "act"] and 0.3 < float((got == 0).float().mean()) < 0.7
    torch.manual_seed(1)
    torch.testing.assert_close(got, modules.original_forward(norm, x))


@pytest.mark.parametrize("cls", [hk.ImageNorm, hk.SequenceChannelNorm])
@pytest.mark.parametrize("strided", [False, True])
def test_channels_keep_the_strides_of_the_original(cls: type[nn.Module], strided: bool) -> None:
    norm = swapped(cls())
    x = torch.randn(2, 64, 4, 6) if cls is hk.ImageNorm else torch.randn(2, 64, 6)
    if strided:
        x = x.transpose(1, -1).contiguous().transpose(1, -1)
    expected, got = modules.original_forward(norm, x), norm(x)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()


@pytest.mark.parametrize("cls", [hk.SequenceChannelNorm, hk.PixelNorm, hk.ChannelsOfAnyNorm, hk.DenseImageNorm])
@torch.no_grad()
def test_dense_channels_are_normalised_where_they_lie(cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    norm = swapped(cls())
    x = torch.randn(3, 64, 5) if cls is hk.SequenceChannelNorm else torch.randn(3, 64, 5, 7)
    x[0, :, 0], x[1, 3, 0], x[2, 5, 1] = 0.0, torch.nan, torch.inf
    x[1, :, 1] *= 1e-20
    expected, before = modules.original_forward(norm, x), x.clone()
    called: list[str] = []
    movedim = torch.Tensor.movedim
    monkeypatch.setattr(torch.Tensor, "movedim", lambda *a: called.append("movedim") or movedim(*a))
    got = norm(x)
    assert called == [] and got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    # Where rows have to be brought together, or a gradient is recorded, the kernels run.
    with torch.enable_grad():
        torch.testing.assert_close(norm(x.requires_grad_()), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert called


@pytest.mark.parametrize(
    ("cls", "shape"),
    [
        (hw.PerHeadNorm, (5, 4, 16)),
        (hk.ScalarNorm, (5, 64)),
        (hk.NarrowOffsetNorm, (5, 64)),
        (hk.ScaledBeforeNorm, (5, 64)),
        (hk.ImageNorm, (2, 64, 3, 2)),
        (hk.GateFirstNorm, (5, 64)),
    ],
)
def test_gradients_are_the_originals(cls: type[nn.Module], shape: tuple[int, ...]) -> None:
    norm = swapped(cls())
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(2 if cls is hk.GateFirstNorm else 1)]
    leaves, direction = [*inputs, *norm.parameters()], torch.randn(shape)
    found = torch.autograd.grad(norm(*inputs), leaves, direction)
    wanted = torch.autograd.grad(modules.original_forward(norm, *inputs), leaves, direction)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_it_runs_survives_pickling() -> None:
    norm = swapped(hk.GateBeforeNorm())
    before, after = modules.execution_of(norm), pickle.loads(pickle.dumps(modules.execution_of(norm)))
    assert (after.spec, after.backend, after.original) == (before.spec, before.backend, before.original)


@pytest.mark.parametrize("shape", [(3, 32), (3, 1), (), (5, 4, 8), (2, 32, 3, 3)])
@pytest.mark.parametrize("name", ["LayerNorm", "no gain", "per head", "image"])
def test_shapes_that_are_not_the_norms_are_the_originals_affair(name: str, shape: tuple[int, ...]) -> None:
    norms = {
        "LayerNorm": nn.LayerNorm(64),
        "no gain": nn.LayerNorm(64, elementwise_affine=False),
        "per head": hw.PerHeadNorm(4, 16),
        "image": hk.ImageNorm(64),
    }
    norm, x = swapped(norms[name]), torch.randn(shape)
    try:
        expected = modules.original_forward(norm, x)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)) as found:
            norm(x)
        assert str(found.value) == str(error)
    else:
        # A gain of heads is spread over a row of one number.
        assert name == "per head" and torch.equal(norm(x), expected)


def test_nested_tensors_go_to_the_original() -> None:
    norm = swapped(nn.LayerNorm(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layout in (torch.strided, torch.jagged):
            x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=layout)
            for one, other in zip(norm(x).unbind(), modules.original_forward(norm, x).unbind(), strict=True):
                torch.testing.assert_close(one, other)


def test_what_happens_under_autocast_is_not_learned_from_zeros() -> None:
    norm = swapped(hk.NarrowingNorm())
    with torch.autocast("cpu", torch.bfloat16):
        norm(torch.zeros(5, 64, dtype=torch.bfloat16))
        x = torch.randn(5, 64).bfloat16()
        assert torch.equal(norm(x), modules.original_forward(norm, x))


def test_a_swap_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(8), hw.Scale(8), nn.LayerNorm(8))
    normswap.patch(model[:1])
    swap = modules.swap

    def fail(module: nn.Module, *args: object) -> None:
        if isinstance(module, hw.Scale):
            raise KeyboardInterrupt
        swap(module, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(modules, "swap", fail)
    with pytest.raises(KeyboardInterrupt):
        normswap.patch(model, backend="cpu", verify=False)
    monkeypatch.undo()
    assert [isinstance(module, modules.FusedNorm) for module in model] == [True, False, False]
    assert modules.execution_of(model[0]).backend == "auto"
