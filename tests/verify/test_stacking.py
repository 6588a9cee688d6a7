"""Sequences as rows of one forward give what each gives alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from parity_models import llama
from torch import nn

from normswap.errors import ModelError
from normswap.inputs import Group, Inputs, Output, make_inputs, run, split

SMALL = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL, intermediate_size=48)).eval()


def gpt2_classifier() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, num_labels=3)
    return transformers.GPT2ForSequenceClassification(config).eval()


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config).eval()


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **SMALL, intermediate_size=48, num_local_experts=4, num_key_value_heads=2, output_router_logits=True
    )
    return transformers.MixtralForCausalLM(config).eval()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8
    )
    return transformers.ViTModel(config).eval()


def outputs(model: nn.Module, groups: list[Group]) -> dict[int, Output]:
    found = {}
    for group in groups:
        pieces = split(run(model, group.batch, torch.float32, "cpu"), group)
        assert len(pieces) == len(group.members)
        found |= dict(zip(group.members, pieces, strict=True))
    return found


@pytest.mark.core
@pytest.mark.parametrize("make", [llama, bert, t5])
def test_pieces_are_what_each_sequence_gives_alone(make) -> None:
    model = make()
    inputs = make_inputs(model, model.config, length=24, stacked=True)
    groups = inputs.groups()
    assert [group.members for group in groups] == [list(range(8))]
    assert groups[0].batch["input_ids"].shape == (8, 24)
    together = outputs(model, groups)
    alone = outputs(model, replace(inputs, positional=None).groups())
    assert together.keys() == alone.keys() == set(range(8))
    for index, output in alone.items():
        assert output.name == together[index].name
        assert output.tensors.keys() == together[index].tensors.keys()
        for name, tensor in output.tensors.items():
            torch.testing.assert_close(together[index].tensors[name], tensor, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0].main, together[1].main, atol=1e-2)


@pytest.mark.core
def test_a_forward_is_no_larger_than_the_limit_and_its_groups_are_even() -> None:
    model = llama()
    inputs = make_inputs(model, model.config, length=24, stacked=True)
    assert inputs.numbers == 24 * 300
    one = 4 * inputs.numbers
    assert [len(group.members) for group in inputs.groups(5 * one)] == [4, 4]
    assert [len(group.members) for group in inputs.groups(3 * one)] == [3, 3, 2]
    assert [group.members for group in inputs.groups(1)] == [[index] for index in range(8)]


@pytest.mark.core
def test_sequences_of_other_lengths_are_not_joined() -> None:
    ids = [torch.zeros(1, n, dtype=torch.long) for n in (5, 5, 4, 5)]
    inputs = Inputs("some", [{"input_ids": row, "use_cache": False} for row in ids], positional=frozenset())
    assert [group.members for group in inputs.groups()] == [[0, 1], [2], [3]]
    assert [tuple(group.batch["input_ids"].shape) for group in inputs.groups()] == [(2, 5), (1, 4), (1, 5)]
    assert inputs.groups()[0].batch["use_cache"] is False


@pytest.mark.core
@pytest.mark.parametrize("make", [gpt2_classifier, mixtral, vit])
def test_what_cannot_be_cut_runs_one_by_one(make) -> None:
    model = make()
    inputs = make_inputs(model, model.config, length=24, stacked=True)
    assert inputs.positional is None
    assert [group.members for group in inputs.groups()] == [[index] for index in range(8)]
    assert outputs(model, inputs.groups()).keys() == set(range(8))


@pytest.mark.core
def test_what_has_one_row_however_many_sequences_there_are_is_not_cut() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(90, 8)

        def forward(self, input_ids):
            return {"logits": self.table(input_ids), "table": self.table.weight[None]}

    assert make_inputs(Same(), None, length=24, stacked=True).positional is None


@pytest.mark.core
def test_nothing_is_stacked_unless_asked_for() -> None:
    model = llama()
    assert make_inputs(model, model.config, length=24).positional is None


@pytest.mark.core
def test_an_output_with_fewer_rows_is_an_error() -> None:
    group = Group({"input_ids": torch.zeros(3, 4, dtype=torch.long)}, [0, 1, 2])
    with pytest.raises(ModelError, match=r"the output loss to have 3 rows.*got shape \[\]; run the sequences one by"):
        split(Output("logits", {"logits": torch.zeros(3, 4, 5), "loss": torch.zeros(())}), group)


@pytest.mark.core
def test_states_are_cut_however_they_lie() -> None:
    group = Group({"input_ids": torch.zeros(2, 5, dtype=torch.long)}, [4, 5])
    states = torch.randn(2, 5, 3)
    for lying in (states, states.transpose(0, 1), states.flatten(0, 1)):
        pieces = group.cut(lying)
        assert pieces is not None and len(pieces) == 2
        assert all(torch.equal(piece, states[row : row + 1]) for row, piece in enumerate(pieces))
    assert group.cut(torch.zeros(7, 3)) is None
    assert group.cut(torch.zeros(())) is None
