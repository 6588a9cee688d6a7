import collections
import sys
import types
import unicodedata
from pathlib import Path

import pytest
import torch
import transformers
from parity_models import llama
from torch import nn

import normswap
from normswap.errors import ModelError, UsageError
from normswap.inputs import Inputs, make_inputs, output_of, run
from normswap.texts import encode, passages_of

ZOO = Path(__file__).resolve().parents[1] / ".." / "shared" / "zoo"


class Words:
    """A tokenizer with a frame of special tokens and one token a character."""

    unk_token_id = 3

    def __init__(self, size=299, unknown=False):
        self.size, self.unknown = size, unknown

    def __call__(self, text, add_special_tokens=True, **_):
        ids = [3 if self.unknown else 10 + ord(c) % (self.size - 10) for c in text]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.mark.core
def test_built_in_text_makes_eight_different_sequences(model):
    inputs = make_inputs(model, model.config, Words())
    assert inputs.description == "8 sequences of 256 tokens of the built-in prompts"
    assert inputs.to_dict() == {
        "kind": "text",
        "sequences": 8,
        "length": 256,
        "description": inputs.description,
    }
    rows = [tuple(batch["input_ids"][0].tolist()) for batch in inputs.batches]
    assert len(set(rows)) == 8
    assert all(len(row) == 256 and row[0] == 1 and row[-1] == 2 for row in rows)
    assert all(batch["use_cache"] is False for batch in inputs.batches)
    assert all(torch.equal(batch["attention_mask"], torch.ones(1, 256)) for batch in inputs.batches)


@pytest.mark.core
def test_more_sequences_than_passages_stay_different(model):
    inputs = make_inputs(model, model.config, Words(), sequences=20, length=64)
    assert len({tuple(batch["input_ids"][0].tolist()) for batch in inputs.batches}) == 20


@pytest.mark.core
def test_seeded_ids_avoid_special_ones_and_repeat(model):
    a, b = make_inputs(model, model.config), make_inputs(model, model.config)
    assert a.description == "8 sequences of 256 seeded token ids"
    ids = torch.cat([batch["input_ids"] for batch in a.batches])
    assert torch.equal(ids, torch.cat([batch["input_ids"] for batch in b.batches]))
    assert ids.min() >= 0 and ids.max() < 300
    assert not torch.isin(ids, torch.tensor([model.config.bos_token_id, model.config.eos_token_id])).any()
    other = make_inputs(model, model.config, seed=1)
    assert not torch.equal(ids, torch.cat([batch["input_ids"] for batch in other.batches]))


@pytest.mark.core
def test_a_file_is_cut_into_sequences(model, tmp_path):
    file = tmp_path / "some.txt"
    file.write_text("abcdefghij" * 400, encoding="utf-8")
    inputs = make_inputs(model, model.config, Words(), text=file, length=128)
    assert inputs.description == "8 sequences of 128 tokens of some.txt"
    assert inputs.batches[0]["input_ids"][0, 1].item() == 10 + ord("a") % 289
    file.write_text("abcdefghij" * 40, encoding="utf-8")
    inputs = make_inputs(model, model.config, Words(), text=file)
    assert inputs.to_dict()["sequences"] == 8 and inputs.length == 52
    file.write_text("short", encoding="utf-8")
    inputs = make_inputs(model, model.config, Words(), text=file)
    assert inputs.description == "1 sequence of 7 tokens of some.txt"


@pytest.mark.core
def test_tokens_are_shared_out_over_the_sequences(model):
    def made(tokens, **options):
        inputs = make_inputs(model, model.config, Words(), tokens=tokens, **options)
        return inputs.sequences, inputs.length

    assert made(512) == (8, 64)
    assert made(1001) == (8, 125)
    assert made(128) == (8, 16)
    assert made(100) == (6, 16)
    assert made(31) == (1, 31)
    assert made(512, sequences=4) == (4, 128)
    with pytest.raises(UsageError, match=r"--tokens 15: expected at least 16, for one sequence; 128 give eight"):
        made(15)


@pytest.mark.core
def test_tokens_beyond_the_positions_make_more_sequences_and_beyond_the_text_are_told(model, tmp_path):
    config = types.SimpleNamespace(**{**vars(model.config), "max_position_embeddings": 40})
    inputs = make_inputs(model, config, Words(), tokens=512)
    assert inputs.description == "13 sequences of 40 tokens of the built-in prompts"
    assert len({tuple(batch["input_ids"].flatten().tolist()) for batch in inputs.batches}) == 13
    inputs = make_inputs(model, config, tokens=512)
    assert inputs.description.endswith("13 sequences of 40 seeded token ids")
    file = tmp_path / "some.txt"
    file.write_text("abcdefghij" * 30, encoding="utf-8")
    inputs = make_inputs(model, model.config, Words(), tokens=512, text=file)
    assert (inputs.sequences, inputs.length) == (8, 39)
    assert inputs.description.endswith("(64 were asked for; the model's positions or the text end before)")


@pytest.mark.core
def test_long_contexts_go_on_through_the_prompts_in_other_orders():
    words = Words(size=300)
    total = sum(len(words(passage, add_special_tokens=False)["input_ids"]) for passage in passages_of(None))
    rows, told = encode(words, passages_of(None), 8, 3 * total, whole=False)
    assert told == total and [len(row) for row in rows] == [3 * total] * 8
    for row in rows:
        body = row[1:-1]
        first, second, third = body[:total], body[total : 2 * total], body[2 * total :]
        assert sorted(first) == sorted(second) and sorted(third) != third
        assert first != second and second[: total - 100] != third[: total - 100]
    assert len({tuple(row[total : total + 200]) for row in rows}) == 8
    short, _ = encode(words, passages_of(None)[:1], 2, 4000, whole=False)
    assert [len(row) for row in short] == [4000, 4000]


@pytest.mark.core
def test_prompts_that_are_gone_through_again_are_told(model):
    class Coarse(Words):
        def __call__(self, text, **options):
            return super().__call__(text[::60], **options)

    config = types.SimpleNamespace(**{**vars(model.config), "max_position_embeddings": 1 << 17})
    assert make_inputs(model, config, Coarse(), tokens=800).description == (
        "8 sequences of 100 tokens of the built-in prompts"
    )
    _, total = encode(Coarse(), passages_of(None), 1, 10, whole=False)
    assert make_inputs(model, config, Coarse(), tokens=1000, sequences=2).description == (
        f"2 sequences of 500 tokens of the built-in prompts, which are {total} tokens and are gone through again in "
        "another order"
    )


@pytest.mark.core
def test_the_prompts_have_many_scripts_code_numbers_and_a_long_text():
    passages = passages_of(None)
    letters = [unicodedata.name(letter, "").split()[0] for letter in "".join(passages) if letter.isalpha()]
    counts = collections.Counter(letters)
    for script in ("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "CJK", "HIRAGANA", "HANGUL"):
        assert counts[script] > 200, script
    assert {"THAI", "GEORGIAN", "ARMENIAN", "TAMIL", "BENGALI"} <= counts.keys()
    assert any("def " in passage for passage in passages)
    assert any(sum(letter.isdigit() for letter in passage) > 200 for passage in passages)
    assert max(map(len, passages)) > 4000
    assert len(set(passages)) == len(passages)
    # Eight sequences of few tokens begin with the first eight.
    early = {unicodedata.name(c, "").split()[0] for passage in passages[:8] for c in passage[:200] if c.isalpha()}
    assert {"LATIN", "CJK", "CYRILLIC", "ARABIC", "GREEK", "HEBREW", "DEVANAGARI", "HANGUL"} <= early


@pytest.mark.core
def test_files_that_are_no_text_are_errors(model, tmp_path):
    file = tmp_path / "some.txt"

    def make(tokenizer=None):
        return make_inputs(model, model.config, tokenizer or Words(), text=file)

    with pytest.raises(UsageError, match="cannot be read: No such file"):
        make()
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(UsageError, match="expected text, got an empty file"):
        make()
    file.write_bytes(b"abc\xff\xfe")
    with pytest.raises(UsageError, match="expected UTF-8 text, got other bytes at 3"):
        make()
    with pytest.raises(UsageError, match="no tokenizer"):
        make_inputs(model, model.config, text=file)


@pytest.mark.core
def test_a_foreign_tokenizer_is_refused(model):
    with pytest.raises(ModelError, match=r"token ids below 300.*LlamaForCausalLM.*repair it"):
        make_inputs(model, model.config, Words(size=5000))


@pytest.mark.core
def test_text_that_is_mostly_unknown_gives_way_to_seeded_ids(model):
    inputs = make_inputs(model, model.config, Words(unknown=True))
    assert inputs.to_dict()["kind"] == "ids"


@pytest.mark.core
@pytest.mark.parametrize("words", [Words(size=99), None])
def test_a_decoder_reads_other_rows_in_each_sequence(words):
    config = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config).eval()
    inputs = make_inputs(model, config, words, length=24)
    rows = [batch["decoder_input_ids"][0].tolist() for batch in inputs.batches]
    assert len(set(map(tuple, rows))) == 8 and all(len(set(row)) > 8 and row[0] == 0 for row in rows)
    for batch, row in zip(inputs.batches, rows, strict=True):
        assert row[1:] == batch["input_ids"][0, :-1].tolist()


@pytest.mark.core
def test_length_is_capped_by_positions(model):
    config = types.SimpleNamespace(**{**vars(model.config), "max_position_embeddings": 40})
    assert make_inputs(model, config, Words()).length == 40


@pytest.mark.core
def test_a_model_that_runs_on_nothing_is_named():
    class Odd(nn.Module):
        def forward(self, input_ids, secret):
            return input_ids

    with pytest.raises(ModelError, match=r"Odd runs on.*required: input_ids, secret"):
        make_inputs(Odd(), types.SimpleNamespace())


@pytest.mark.core
def test_a_module_of_unknown_make_is_run_on_rows_of_its_width():
    inputs = make_inputs(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 5)), None)
    assert inputs.batches[0]["input"].shape == (1, 32, 24) and len(inputs.batches) == 8
    assert inputs.to_dict()["kind"] == "tensor"


@pytest.mark.core
def test_floats_are_cast_and_draws_repeat():
    class Noisy(nn.Module):
        def forward(self, x, ids):
            return {"logits": x + torch.rand(1, dtype=x.dtype), "ids": ids}

    batch = {"x": torch.zeros(1, 2), "ids": torch.ones(1, 2, dtype=torch.long)}
    state = torch.random.get_rng_state()
    first = run(Noisy(), batch, torch.bfloat16, "cpu").main
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, run(Noisy(), batch, torch.bfloat16, "cpu").main)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.core
def test_the_output_that_is_compared():
    a, b = torch.zeros(1, 2, 3), torch.ones(1, 2)
    found = output_of({"loss": torch.zeros(()), "x": b, "logits": a})
    assert (found.name, found.main is a, sorted(found.tensors)) == ("logits", True, ["logits", "loss", "x"])
    assert output_of({"x": b, "last_hidden_state": a}).name == "last_hidden_state"
    assert output_of({"one": torch.zeros(1, 1), "inner": {"x": b}}).name == "inner.x"
    assert output_of((torch.zeros(3, dtype=torch.long), b)).name == "output[1]"
    assert output_of(a).name == "output"
    with pytest.raises(ModelError, match="expected a floating tensor"):
        output_of({"ids": torch.zeros(2, 2, dtype=torch.long)})
    with pytest.raises(ModelError, match="got NoneType"):
        output_of(None)


# The zoo leaves files open.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.zoo
@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("bert", "ids"),
        ("roberta", "ids"),
        ("gpt2", "ids"),
        ("t5", "ids"),
        ("bart", "ids"),
        ("mamba", "ids"),
        ("whisper", "audio"),
        ("wav2vec2", "audio"),
        ("vit", "image"),
        ("swinv2", "image"),
        ("convnext", "image"),
        ("clip", "ids+image"),
        ("llava", "ids+image"),
        ("gemma3", "ids+image"),
        ("qwen2_vl", "ids+image"),
    ],
)
def test_families_run(model_type, kind):
    if not (ZOO / "tiny.py").is_file():
        pytest.skip("the zoo of tiny models is not here")
    sys.path.insert(0, str(ZOO))
    try:
        tiny = pytest.importorskip("tiny")
    finally:
        sys.path.remove(str(ZOO))
    model = tiny.tiny_model(model_type)
    inputs = make_inputs(model, model.config)
    assert isinstance(inputs, Inputs) and inputs.kind == kind
    assert len(inputs.batches) == 8
    for batch in inputs.batches:
        assert run(model, batch, torch.float32, "cpu").main.isfinite().all()


@pytest.mark.core
def test_without_inputs_a_measurement_says_how_to_go_on():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, input_ids, secret):
            return self.norm(secret)

    with pytest.raises(ModelError, match=r"required: input_ids, secret.*--no-verify goes on without"):
        normswap.verify(Odd())
