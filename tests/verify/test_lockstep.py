"""Several forwards at once read every layer once, and none sees the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import saved, tiny_bert, tiny_llama
from torch import nn
from transformers import AlbertConfig, AlbertModel, MixtralConfig, MixtralForCausalLM

import normswap
from normswap.errors import CheckpointError, ModelError
from normswap.folding import make_fold_plan
from normswap.gains import fold_
from normswap.inputs import run
from normswap.loading import build_meta, load_model, resolve
from normswap.lockstep import current, forwards, run_all
from normswap.offloading import load_streamed, stream_of
from normswap.plan import make_plan
from normswap.streamfold import fold_streamed_
from normswap.untying import untie_
from normswap.waiting import Waiting

pytestmark = pytest.mark.core


def batches(count: int = 3, length: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(64, (1, length + index), generator=generator)} for index in range(count)]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No thread outlives its test."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("forward ")] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tiny_llama(), tmp_path)


def streamed(folder: Path, **options: Any) -> nn.Module:
    return load_streamed(resolve(folder), dtype=torch.float32, **{"small": 0, **options})


def loads(model: nn.Module) -> int:
    stream = stream_of(model)
    assert stream is not None
    return stream.loads


def check_forwards(model: nn.Module, whole: nn.Module, given: list[dict[str, Any]]) -> None:
    found = list(forwards(model, given, torch.float32, "cpu"))
    assert [index for index, _ in found] == list(range(len(given)))
    for (_, output), batch in zip(found, given, strict=True):
        assert torch.equal(output.main, run(whole, batch, torch.float32, "cpu").main)
    assert all(isinstance(parameter, Waiting) for parameter in model.parameters())


def test_every_part_is_read_once_for_all(folder: Path) -> None:
    model, whole = streamed(folder), load_model(resolve(folder), dtype=torch.float32)
    check_forwards(model, whole, batches(5))
    assert loads(model) == 5


def test_a_model_in_memory_runs_one_after_the_other(folder: Path) -> None:
    whole = load_model(resolve(folder), dtype=torch.float32)
    seen: list[int | None] = []
    whole.model.norm.register_forward_hook(lambda *_: seen.append(current()))
    found = list(forwards(whole, batches(), torch.float32, "cpu"))
    assert [index for index, _ in found] == [0, 1, 2] == seen
    assert current() is None


def test_hooks_know_which_forward_is_running(folder: Path) -> None:
    model = streamed(folder)
    seen: list[tuple[str, int | None, int]] = []
    for name in ("model.layers.0", "model.layers.1"):

        def note(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            seen.append((name, current(), hidden.shape[1]))

        model.get_submodule(name).register_forward_hook(note)
    list(forwards(model, batches(), torch.float32, "cpu"))
    assert seen == [(f"model.layers.{layer}", index, 8 + index) for layer in (0, 1) for index in range(3)]


def test_each_forward_draws_its_own_random_numbers(folder: Path) -> None:
    model, whole = streamed(folder), load_model(resolve(folder), dtype=torch.float32)

    def noisy(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + torch.randn(output[0].shape), *output[1:])
        return output + torch.randn(output.shape)

    for one in (model, whole):
        for layer in one.model.layers:
            layer.register_forward_hook(noisy)
    before = torch.get_rng_state()
    check_forwards(model, whole, batches())
    assert torch.equal(torch.get_rng_state(), before)


def test_outputs_come_as_soon_as_they_are_there(folder: Path) -> None:
    model = streamed(folder)
    ended: list[int | None] = []
    model.register_forward_hook(lambda *_: ended.append(current()))
    for index, _ in forwards(model, batches(), torch.float32, "cpu"):
        assert ended == list(range(index + 1))


def test_a_layer_that_is_shared_is_run_as_often_as_it_is_called(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 48}
    config = AlbertConfig(**sizes, num_hidden_layers=4, num_attention_heads=2, max_position_embeddings=64)
    source = resolve(saved(AlbertModel(config).eval(), tmp_path))
    model, whole = load_streamed(source, dtype=torch.float32, small=0), load_model(source, dtype=torch.float32)
    given = [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches()]
    check_forwards(model, whole, given)


def test_forwards_that_take_other_paths_wait_for_nobody(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    source = resolve(saved(MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval(), tmp_path))
    whole = load_model(source, dtype=torch.float32)
    # Every module by itself: where experts are modules, no two tokens need the same.
    model = load_streamed(source, dtype=torch.float32, small=0, unit_bytes=1)
    given = [{**batch, "use_cache": False} for batch in batches(6, length=1)]
    for (_, output), batch in zip(forwards(model, given, torch.float32, "cpu"), given, strict=True):
        # The product of a matrix and one row depends on how the matrix lies in memory.
        torch.testing.assert_close(output.main, run(whole, batch, torch.float32, "cpu").main, rtol=0, atol=1e-6)
    stream = stream_of(model)
    assert stream is not None and stream.loads >= len(stream.units)


def test_calls_may_run_the_model_several_times_and_end_out_of_order(folder: Path) -> None:
    model, whole = streamed(folder), load_model(resolve(folder), dtype=torch.float32)
    times = [3, 1, 2, 0]

    def call(count: int, one: nn.Module) -> list[torch.Tensor]:
        return [run(one, batch, torch.float32, "cpu").main for batch in batches(count)]

    found = list(run_all(model, [lambda count=count: call(count, model) for count in times]))
    for (index, outputs), count in zip(found, times, strict=True):
        assert index == times.index(count)
        assert all(torch.equal(*pair) for pair in zip(outputs, call(count, whole), strict=True))


def test_a_failure_ends_all(folder: Path) -> None:
    model = streamed(folder)
    beyond = {"input_ids": torch.tensor([[1000]])}
    with pytest.raises(ModelError, match="does not run on"):
        list(forwards(model, [*batches(2), beyond], torch.float32, "cpu"))
    check_forwards(model, load_model(resolve(folder), dtype=torch.float32), batches())


def test_an_interruption_ends_all(folder: Path) -> None:
    model = streamed(folder)

    def interrupt(*_: Any) -> None:
        if current() == 1:
            raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(forwards(model, batches(), torch.float32, "cpu"))
    handle.remove()
    check_forwards(model, load_model(resolve(folder), dtype=torch.float32), batches())


def test_who_stops_listening_leaves_nothing_behind(folder: Path) -> None:
    model = streamed(folder)
    going = forwards(model, batches(), torch.float32, "cpu")
    assert next(going)[0] == 0
    with pytest.raises(RuntimeError, match="running already"):
        next(forwards(model, batches(), torch.float32, "cpu"))
    going.close()
    check_forwards(model, load_model(resolve(folder), dtype=torch.float32), batches())


def test_the_model_may_be_run_between_two_results(folder: Path) -> None:
    model, whole = streamed(folder), load_model(resolve(folder), dtype=torch.float32)
    for index, _ in forwards(model, batches(), torch.float32, "cpu"):
        batch = batches()[index]
        assert torch.equal(run(model, batch, torch.float32, "cpu").main, run(whole, batch, torch.float32, "cpu").main)


def test_a_file_that_cannot_be_read_is_told_as_such(folder: Path) -> None:
    model = streamed(folder)
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        list(forwards(model, batches(), torch.float32, "cpu"))


@pytest.mark.parametrize("small", [0, 1 << 16], ids=["nothing resident", "gains resident"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_folds_are_made_when_weights_are_read(tmp_path: Path, tied: bool, small: int) -> None:
    folder = saved(tiny_llama(tie_word_embeddings=tied).to(torch.bfloat16), tmp_path)
    check_folds(folder, small)


@pytest.mark.parametrize("small", [0, 1 << 16], ids=["nothing resident", "gains resident"])
def test_biases_move_when_gains_are_folded(tmp_path: Path, small: int) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=2)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    check_folds(saved(model.to(torch.bfloat16), tmp_path), small)


def check_folds(folder: Path, small: int) -> None:
    source = resolve(folder)
    meta = build_meta(source)
    folds = make_fold_plan(meta, make_plan(meta), tied="untie")
    assert len(folds.folds) == 5
    whole = load_model(source, dtype=torch.float32)
    if folds.unties:
        untie_(whole)
    fold_(whole, folds)
    model = fold_streamed_(load_streamed(source, dtype=torch.float32, small=small, untied=folds.unties), folds)
    for (_, output), batch in zip(forwards(model, batches(), torch.float32, "cpu"), batches(), strict=True):
        assert torch.equal(output.main, run(whole, batch, torch.float32, "cpu").main)
    got, expected = dict(model.named_parameters()), dict(whole.named_parameters())
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name].detach(), expected[name].detach()) for name in expected)


def test_a_fold_that_would_not_be_exact_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[3] = float("inf")
    source = resolve(saved(model, tmp_path))
    meta = build_meta(source)
    folds = make_fold_plan(meta, make_plan(meta))
    one = load_streamed(source, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"cannot fold model\.norm: its gain holds NaN or infinite values"):
        fold_streamed_(one, folds)
    stored = load_file(source.path / "model.safetensors")
    assert all(torch.equal(parameter.detach(), stored[name]) for name, parameter in one.named_parameters())


def test_a_model_without_a_cache_is_not_asked_for_none(tmp_path: Path) -> None:
    source = resolve(saved(tiny_bert(), tmp_path))
    model, whole = load_streamed(source, dtype=torch.float32, small=0), load_model(source, dtype=torch.float32)
    check_forwards(model, whole, batches())


def test_a_verification_says_the_same_layer_by_layer(tmp_path: Path) -> None:
    original = saved(tiny_llama().to(torch.bfloat16), tmp_path / "original")
    normswap.convert(original, tmp_path / "folded", fold=True, verify=False)
    whole, streamed = (
        normswap.verify(tmp_path / "folded", original, device="cpu", tokens=256, max_memory=memory).to_dict()
        for memory in (None, 1000)
    )
    assert (whole["streamed"], streamed["streamed"]) == (False, True)
    assert whole["verdict"] == streamed["verdict"] == "pass"
    assert streamed["exact"]["error"] == pytest.approx(whole["exact"]["error"], rel=0.2)
    assert streamed["logits"]["ratio"] == pytest.approx(whole["logits"]["ratio"], rel=0.05)
    assert [norm["max_ulp"] for norm in streamed["norms"]] == [norm["max_ulp"] for norm in whole["norms"]]
