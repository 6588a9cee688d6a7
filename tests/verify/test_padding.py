"""Batches of sequences of unequal length, padded on either side."""

from __future__ import annotations

import types

import pytest
import torch
import transformers
from parity_models import llama
from torch import nn

from normswap.errors import UsageError
from normswap.inputs import Inputs, make_inputs, run, split
from normswap.padding import pad, pad_token, shortened

SMALL = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL, intermediate_size=48)).eval()


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4)).eval()


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config).eval()


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=90, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def lengths(inputs: Inputs) -> list[int]:
    return [one["input_ids"].shape[1] for one in inputs.batches]


@pytest.mark.core
@pytest.mark.parametrize("make", [llama, gpt2, t5])
def test_padding_on_either_side_gives_what_each_sequence_gives_alone(make) -> None:
    model = make()
    inputs = make_inputs(model, model.config, length=24, batch=3)
    assert lengths(inputs) == [24, 18, 12, 24, 18, 12, 24, 18]
    assert [group.members for group in inputs.groups()] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    for group in inputs.groups():
        pieces = split(run(model, group.batch, torch.float32, "cpu"), group)
        for index, piece in zip(group.members, pieces, strict=True):
            alone = run(model, inputs.batches[index], torch.float32, "cpu")
            assert piece.name == "logits" and piece.tensors.keys() == alone.tensors.keys()
            for name, tensor in alone.tensors.items():
                torch.testing.assert_close(piece.tensors[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.core
def test_sides_alternate_and_masks_say_what_counts() -> None:
    model = llama()
    inputs = make_inputs(model, model.config, length=24, batch=4)
    left, right = inputs.groups()
    for group, begins in ((left, False), (right, True)):
        assert group.batch["input_ids"].shape == (4, 24)
        assert torch.equal(group.batch["attention_mask"], group.valid.long())
        assert group.valid.sum(1).tolist() == [24, 20, 16, 12]
        assert group.valid[1:, 0].tolist() == [begins] * 3 and group.valid[1:, -1].tolist() == [not begins] * 3
        for row, index in enumerate(group.members):
            ids = inputs.batches[index]["input_ids"][0]
            assert torch.equal(group.batch["input_ids"][row][group.valid[row]], ids)
            positions = group.batch["position_ids"][row][group.valid[row]]
            assert torch.equal(positions, torch.arange(len(ids)))
        assert set(group.batch["input_ids"][~group.valid].tolist()) == {pad_token(model, model.config, None)}
    states = torch.randn(4, 24, 5)
    pieces = left.cut(states)
    assert [tuple(piece.shape) for piece in pieces] == [(1, 24, 5), (1, 20, 5), (1, 16, 5), (1, 12, 5)]
    assert torch.equal(pieces[3][0], states[3, 12:])
    assert inputs.description == (
        "8 sequences of 12 to 24 seeded token ids, in 2 batches of 4, padded on the left and on the right in turn"
    )


@pytest.mark.core
def test_both_sides_occur_however_large_a_batch() -> None:
    model = llama()
    inputs = make_inputs(model, model.config, length=10, batch=6)
    assert inputs.sequences == 12 and [len(group.members) for group in inputs.groups()] == [6, 6]


@pytest.mark.core
def test_a_decoder_has_its_own_mask_and_reads_different_rows() -> None:
    model = bart()
    inputs = make_inputs(model, model.config, length=24, batch=4)
    for group in inputs.groups():
        assert torch.equal(group.batch["decoder_attention_mask"], group.valid.long())
        assert "position_ids" not in group.batch
        assert len({tuple(row.tolist()) for row in group.batch["decoder_input_ids"]}) == 4
        (first, *_) = split(run(model, group.batch, torch.float32, "cpu"), group)
        assert first.tensors["encoder_last_hidden_state"].shape == (1, 24, 32)


@pytest.mark.core
def test_pooled_rows_are_kept_whole() -> None:
    model = bert()
    # As long as the rows are wide: a shape alone would not tell positions from channels.
    inputs = make_inputs(model, model.config, length=32, batch=4)
    (group, _) = inputs.groups()
    assert group.positional == {"last_hidden_state"}
    pieces = split(run(model, group.batch, torch.float32, "cpu"), group)
    assert [tuple(piece.tensors["pooler_output"].shape) for piece in pieces] == [(1, 32)] * 4
    assert [piece.main.shape[1] for piece in pieces] == [32, 27, 22, 16]
    assert "position_ids" not in group.batch


@pytest.mark.core
def test_positions_of_several_axes_are_left_to_the_model() -> None:
    model = llama()
    singles = shortened(make_inputs(model, model.config, length=12).batches, 2)
    config = types.SimpleNamespace(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]})
    assert "position_ids" not in pad(model, config, singles, 2, 0, frozenset())[0].batch
    assert "position_ids" in pad(model, model.config, singles, 2, 0, frozenset())[0].batch


@pytest.mark.core
def test_a_last_token_stays_last() -> None:
    ids = torch.arange(10)[None]
    cut = shortened([{"input_ids": ids, "decoder_input_ids": ids[:, :8]}] * 3, 3)
    assert [one["input_ids"].tolist() for one in cut] == [
        [[0, 1, 2, 3, 4, 5, 6, 9]], [[0, 1, 2, 3, 4, 9]], [[0, 1, 2, 9]],
    ]  # fmt: skip
    assert [one["decoder_input_ids"].shape[1] for one in cut] == [8, 6, 4]


@pytest.mark.core
def test_the_padding_is_the_tokenizers() -> None:
    model = llama()
    config = types.SimpleNamespace(pad_token_id=None, eos_token_id=[7, 8])
    assert pad_token(model, config, types.SimpleNamespace(pad_token_id=5, eos_token_id=6)) == 5
    assert pad_token(model, config, types.SimpleNamespace(pad_token_id=None, eos_token_id=6)) == 6
    assert pad_token(model, config, types.SimpleNamespace(pad_token_id=10**6, eos_token_id=None)) == 7
    assert pad_token(model, types.SimpleNamespace(), None) == 0


@pytest.mark.core
def test_models_that_read_no_padded_text_are_refused() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8
    )
    vit = transformers.ViTModel(config)
    with pytest.raises(UsageError, match=r"--batch 4: expected a model whose forward takes input_ids.*ViTModel; leave"):
        make_inputs(vit, vit.config, batch=4)

    class NoMask(nn.Module):
        def forward(self, input_ids):
            return input_ids.float()

    with pytest.raises(UsageError, match=r"takes attention_mask, as padded text does, got NoMask; leave --batch out"):
        make_inputs(NoMask(), types.SimpleNamespace(), batch=2)
    with pytest.raises(UsageError, match=r"--batch 0: expected at least one"):
        make_inputs(vit, vit.config, batch=0)
    gpt = transformers.GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, num_labels=3)
    classifier = transformers.GPT2ForSequenceClassification(gpt).eval()
    with pytest.raises(UsageError, match=r"--batch 2: GPT2ForSequenceClassification: its outputs for several sequ"):
        make_inputs(classifier, gpt, length=20, batch=2)


@pytest.mark.core
def test_one_sequence_a_batch_is_as_before() -> None:
    model = llama()
    inputs = make_inputs(model, model.config, length=20)
    assert inputs.padded == [] and lengths(inputs) == [20] * 8
