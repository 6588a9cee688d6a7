"""Greedy continuations of two models, and where they part."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers
from parity_models import llama
from torch import nn

import normswap
from normswap.errors import ModelError, UsageError
from normswap.generating import (
    Continuation,
    check_generates,
    continuations,
    judge_generation,
    next_logits,
    parted,
    prompts_of,
)
from normswap.inputs import make_inputs

SMALL = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class Letters:
    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=90, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20,
        max_target_positions=60, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        begin_suppress_tokens=[5],
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config).eval()


def llava() -> nn.Module:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config={**vision, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8},
        text_config={**vision, "model_type": "llama", "vocab_size": 90, "num_key_value_heads": 4},
        image_token_id=80, vision_feature_layer=-1,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).eval()
    # It is never the likeliest, so that nothing is written that stands for an image.
    with torch.no_grad():
        model.lm_head.weight[80] = model.lm_head.weight[79]
    return model


def made(ids, top_ids=None, top_logits=None) -> Continuation:
    top_ids = torch.tensor(top_ids if top_ids is not None else [[i] for i in ids])
    return Continuation(ids, top_ids, torch.zeros(top_ids.shape) if top_logits is None else torch.tensor(top_logits))


@pytest.mark.core
@pytest.mark.parametrize("make", [llama, t5, whisper, llava])
def test_a_continuation_is_the_likeliest_token_at_each_step(make) -> None:
    torch.manual_seed(1)
    model = make()
    prompts = prompts_of(make_inputs(model, model.config, sequences=3, length=40, stacked=True), tokens=7)
    found = continuations(model, prompts, 5)
    assert [len(one.ids) for one in found] == [5, 5, 5]
    for one, prompt in zip(found, prompts.batches, strict=True):
        for place in range(5):
            logits = next_logits(model, prompt, one.ids[:place])
            assert logits.shape == (model.get_output_embeddings().weight.shape[0],) and logits.dtype == torch.float32
            top = logits.topk(one.top_ids.shape[1])
            torch.testing.assert_close(one.top_logits[place], top.values, rtol=1e-4, atol=1e-4)
            # Two tokens may have the very same logit.
            for token in (one.ids[place], int(one.top_ids[place][0])):
                assert float(logits[token]) >= float(top.values[0]) - 1e-6


@pytest.mark.core
def test_prompts_are_beginnings_and_a_decoder_begins_with_its_first_token() -> None:
    model = llama()
    inputs = make_inputs(model, model.config, length=40)
    prompts = prompts_of(inputs, 7)
    assert [one.keys() for one in prompts.batches] == [{"input_ids", "attention_mask"}] * 8
    assert all(value.shape == (1, 7) for one in prompts.batches for value in one.values())
    for one, whole in zip(prompts.batches, inputs.batches, strict=True):
        assert torch.equal(one["input_ids"], whole["input_ids"][:, :7])
    model = t5()
    (first, *_) = prompts_of(make_inputs(model, model.config, length=40), 7).batches
    assert first["input_ids"].shape == (1, 40) and first["decoder_input_ids"].tolist() == [[0]]
    model = llava()
    inputs = make_inputs(model, model.config, length=40)
    (first, *_) = prompts_of(inputs, 7).batches
    assert torch.equal(first["input_ids"], inputs.batches[0]["input_ids"]) and "pixel_values" in first


@pytest.mark.core
def test_padded_batches_are_continued_from_their_sequences() -> None:
    model = llama()
    inputs = make_inputs(model, model.config, length=24, batch=4)
    prompts = prompts_of(inputs, 14)
    assert [one["input_ids"].shape[1] for one in prompts.batches] == [14, 14, 14, 12] * 2
    assert {tuple(group.batch["input_ids"].shape) for group in prompts.groups()} == {(3, 14), (1, 12)}
    found = continuations(model, prompts, 2)
    for one, prompt in zip(found, prompts.batches, strict=True):
        assert one.ids[0] == int(next_logits(model, prompt, []).argmax())


@pytest.mark.core
def test_what_the_generation_config_adds_has_no_part_and_stays() -> None:
    model = llama()
    prompts = prompts_of(make_inputs(model, model.config, sequences=2, length=20), 6)
    before = continuations(model, prompts, 8)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.eos_token_id = [one.ids[1] for one in before]
    model.generation_config.max_length = 7
    own = model.generation_config
    kept = copy.deepcopy(own).to_dict()
    state = torch.random.get_rng_state()
    assert [one.ids for one in continuations(model, prompts, 8)] == [one.ids for one in before]
    assert model.generation_config is own and own.to_dict() == kept
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.core
def test_models_that_do_not_generate_are_refused() -> None:
    config = transformers.BertConfig(**SMALL, intermediate_size=48)
    for model in (transformers.BertModel(config), transformers.BertForSequenceClassification(config), nn.Linear(2, 2)):
        with pytest.raises(UsageError, match=rf"generates text, got {type(model).__name__}, which does not; leave"):
            check_generates(model)
    check_generates(llama())


@pytest.mark.core
def test_a_model_that_fails_to_generate_is_named_and_keeps_its_config(monkeypatch) -> None:
    model = llama()
    own = model.generation_config
    prompts = prompts_of(make_inputs(model, model.config, sequences=2, length=20), 6)

    def broken(*args, **kwargs):
        raise ValueError("no cache of this kind")

    monkeypatch.setattr(model, "prepare_inputs_for_generation", broken)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM does not generate from input_ids.*no cache of this kind"):
        continuations(model, prompts, 4)
    assert model.generation_config is own


@pytest.mark.core
def test_where_continuations_part() -> None:
    left = [made([1, 2, 3]), made([4, 5, 6]), made([7, 8, 9])]
    right = [made([1, 2, 3]), made([4, 0, 6]), made([0, 8, 9])]
    assert parted(left, right) == [(1, 1), (2, 0)]
    with pytest.raises(ValueError, match="shorter"):
        parted(left, right[:2])


@pytest.mark.core
def test_the_reference_is_asked_only_where_they_part() -> None:
    asked = []

    def reference(prompt, ids):
        asked.append((prompt, ids))
        return torch.zeros(26)

    same = [made([1, 2, 3]), made([4, 5, 6])]
    found, failures = judge_generation(same, same, reference, torch.bfloat16)
    assert (found.tokens, found.prompts, found.same, found.divergences, failures, asked) == (3, 2, 2, [], [], [])
    found, failures = judge_generation(same, [same[0], made([4, 5, 7])], reference, torch.bfloat16)
    assert asked == [(1, [4, 5])] and found.same == 1 and failures == []
    assert (found.divergences[0].position, found.divergences[0].words) == (2, None)


@pytest.mark.core
@pytest.mark.parametrize(
    ("margin", "dtype", "resolution", "tie"),
    [
        # Logits of 8 to 16 are 1/16 apart in bfloat16, 1/128 in float16.
        (0.0625, torch.bfloat16, 0.0625, True),
        (0.0626, torch.bfloat16, 0.0625, False),
        (0.0626, torch.float16, 0.0078125, False),
        (-3.0, torch.float16, 0.0078125, True),
        (math.nan, torch.bfloat16, 0.0625, False),
    ],
)
def test_a_tie_is_below_one_unit_of_the_logits(margin, dtype, resolution, tie) -> None:
    logits = torch.zeros(26, dtype=torch.float64)
    logits[2], logits[3] = 12.0 + margin, 12.0
    a = made([2, 5], [[2, 3]] * 2, [[float(logits[2]), 12.0]] * 2)
    found, failures = judge_generation([a], [made([3, 5])], lambda *_: logits, dtype, Letters())
    (one,) = found.divergences
    assert one.tie is tie and (one.original, one.converted, one.words) == (2, 3, ("c", "d"))
    assert one.margin == pytest.approx(margin, nan_ok=True)
    if not math.isnan(margin):
        # The float32 of the kept logits is not the reference's float64.
        assert one.resolution == pytest.approx(resolution, rel=1e-4)
    if tie:
        assert failures == []
    else:
        (said,) = failures
        assert said.startswith("generation: prompt 1 parts after 0 tokens: 'd' in place of 'c', which the reference ")
        assert str(dtype).removeprefix("torch.") in said


@pytest.mark.core
def test_the_originals_own_error_widens_the_resolution() -> None:
    logits = torch.zeros(26, dtype=torch.float64)
    logits[2], logits[3] = 12.4, 12.0
    # Alike but for the two: their difference is 0.5 off.
    pair = made([2], [[2, 3]], [[12.9, 12.0]])
    found, _ = judge_generation([pair], [made([3])], lambda *_: logits, torch.bfloat16)
    assert found.divergences[0].tie
    # So it is where the others are exact.
    many = made([2], [[2, 3, *range(4, 24)]], [[12.9, 12.0, *[0.0] * 20]])
    found, _ = judge_generation([many], [made([3])], lambda *_: logits, torch.bfloat16)
    assert found.divergences[0].resolution == pytest.approx(0.5, rel=1e-5)
    # The same error in every logit is none.
    shifted = made([2], [[2, 3, 4, 5]], [[13.4, 13.0, 1.0, 1.0]])
    found, failures = judge_generation([shifted], [made([3])], lambda *_: logits, torch.bfloat16)
    assert not found.divergences[0].tie and len(failures) == 1
    # Errors of the others tell how far off these two may be.
    others = made([2], [[2, 3, 4, 5, 6, 7]], [[12.4, 12.0, 0.1, -0.1, 0.15, -0.15]])
    found, _ = judge_generation([others], [made([3])], lambda *_: logits, torch.bfloat16)
    assert found.divergences[0].tie and 0.4 < found.divergences[0].resolution < 0.6


@pytest.mark.core
def test_a_wrong_gain_parts_where_it_is_no_tie() -> None:
    torch.manual_seed(3)
    exact = llama()
    served = copy.deepcopy(exact).to(torch.bfloat16)
    prompts = prompts_of(make_inputs(exact, exact.config, length=30, stacked=True), 12)
    wrong = copy.deepcopy(served)
    with torch.no_grad():
        wrong.model.layers[0].input_layernorm.weight[::2] *= 3

    def reference(prompt, ids):
        return next_logits(exact, prompts.batches[prompt], ids)

    a = continuations(served, prompts, 16)
    for model, faults in ((served, False), (wrong, True)):
        found, failures = judge_generation(a, continuations(model, prompts, 16), reference, torch.bfloat16)
        assert bool(failures) is faults, (failures, found)
        assert faults or found.same == 8


def test_what_rounding_folded_weights_parts_is_a_tie() -> None:
    prompts = prompts_of(make_inputs(llama(), llama().config, length=30, stacked=True), 12)
    parting = 0
    for seed in range(5):
        served = _with_other_gains(llama(), seed).to(torch.bfloat16)
        exact, folded = copy.deepcopy(served).float(), copy.deepcopy(served)
        normswap.fold(folded)
        a, b = (continuations(model, prompts, 16) for model in (served, folded))
        found, failures = judge_generation(
            a, b, lambda prompt, ids, exact=exact: next_logits(exact, prompts.batches[prompt], ids), torch.bfloat16
        )
        assert failures == [], found
        parting += found.prompts - found.same
    assert parting


def _with_other_gains(model: nn.Module, seed: int) -> nn.Module:
    """Another model of the same make: rows shuffled, gains drawn."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameter[torch.randperm(len(parameter))])
            if "norm" in name:
                parameter.uniform_(0.5, 2)
    return model
