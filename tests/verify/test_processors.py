"""Images and sounds through processors as checkpoints carry them."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from normswap.generating import continuations, prompts_of
from normswap.inputs import Inputs, make_inputs, run
from normswap.processors import Processor, load_processor, picture, processed, sound

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def tokenizer(*extra: str) -> tuple[transformers.PreTrainedTokenizerFast, dict[str, int]]:
    """One token a byte."""
    signs = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<s>", "</s>", *extra]
    vocab = {sign: index for index, sign in enumerate(signs)}
    bytewise = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, **special, additional_special_tokens=list(extra)
    ), vocab


def vit() -> tuple[object, nn.Module]:
    model = transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=16, patch_size=8))
    return transformers.ViTImageProcessor(size={"height": 16, "width": 16}), model


def clip() -> tuple[object, nn.Module]:
    words, vocab = tokenizer()
    config = transformers.CLIPConfig(
        text_config={**SMALL, "vocab_size": len(vocab), "eos_token_id": 258, "bos_token_id": 257},
        vision_config={**SMALL, "image_size": 16, "patch_size": 8}, projection_dim=16,
    )  # fmt: skip
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return transformers.CLIPProcessor(pixels, words), transformers.CLIPModel(config)


def llava(chat: str | None = None) -> tuple[object, nn.Module]:
    words, vocab = tokenizer("<image>")
    config = transformers.LlavaConfig(
        vision_config={**SMALL, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8},
        text_config={**SMALL, "model_type": "llama", "vocab_size": len(vocab)},
        image_token_id=vocab["<image>"], vision_feature_layer=-1,
    )  # fmt: skip
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = transformers.LlavaProcessor(
        pixels, words, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=chat,
    )  # fmt: skip
    return processor, transformers.LlavaForConditionalGeneration(config)


def llava_chat() -> tuple[object, nn.Module]:
    return llava("Q: " + CHAT.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>") + " A:")


def qwen2_vl() -> tuple[object, nn.Module]:
    pytest.importorskip("torchvision")
    words, vocab = tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    config = transformers.Qwen2VLConfig(
        text_config={
            **SMALL, "vocab_size": len(vocab), "num_key_value_heads": 4, "bos_token_id": 257, "eos_token_id": 258,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        },
        vision_config={"embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 4, "mlp_ratio": 2},
        image_token_id=vocab["<|image_pad|>"], video_token_id=vocab["<|video_pad|>"],
        vision_start_token_id=vocab["<|vision_start|>"], vision_end_token_id=vocab["<|vision_end|>"],
    )  # fmt: skip
    pixels = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
    processor = transformers.Qwen2VLProcessor(pixels, words, transformers.Qwen2VLVideoProcessor(), chat_template=CHAT)
    return processor, transformers.Qwen2VLForConditionalGeneration(config)


def whisper(seconds: int = 2) -> tuple[object, nn.Module]:
    words, vocab = tokenizer()
    config = transformers.WhisperConfig(
        vocab_size=len(vocab), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=100,
        max_target_positions=60, decoder_start_token_id=257, bos_token_id=257, eos_token_id=258, pad_token_id=256,
    )  # fmt: skip
    heard = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=seconds)
    return transformers.WhisperProcessor(heard, words), transformers.WhisperForConditionalGeneration(config)


def wav2vec2() -> tuple[object, nn.Module]:
    config = transformers.Wav2Vec2Config(
        **SMALL, conv_dim=(16, 16), conv_kernel=(10, 8), conv_stride=(50, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    return transformers.Wav2Vec2FeatureExtractor(), transformers.Wav2Vec2Model(config)


def saved(folder: Path, processor, model) -> types.SimpleNamespace:
    processor.save_pretrained(folder)
    model.config.save_pretrained(folder)
    return types.SimpleNamespace(path=folder, trust_remote_code=False)


def differ(inputs: Inputs, name: str) -> bool:
    """Whether no two sequences have the same."""
    return len({batch[name].numpy().tobytes() for batch in inputs.batches}) == len(inputs.batches)


@pytest.mark.parametrize(
    ("make", "kind", "named", "media", "said"),
    [
        (vit, "image", "ViTImageProcessor", "pixel_values", "8 seeded image inputs of shape 1 x 3 x 16 x 16"),
        (clip, "text+image", "CLIPProcessor", "pixel_values", "8 sequences of 32 tokens of the built-in"),
        (llava, "text+image", "LlavaProcessor", "pixel_values", "8 sequences of 68 tokens of the built-in"),
        (llava_chat, "text+image", "LlavaProcessor", "pixel_values", "8 sequences of 74 tokens of the built-in"),
        (qwen2_vl, "text+image", "Qwen2VLProcessor", "pixel_values", "8 sequences of 78 tokens of the built-in"),
        (whisper, "audio", "WhisperProcessor", "input_features", "8 seeded audio inputs of shape 1 x 8 x 200"),
        (wav2vec2, "audio", "Wav2Vec2FeatureExtractor", "input_values", "8 seeded audio inputs of shape 1 x 32000"),
    ],
)
def test_inputs_come_through_the_checkpoints_processor(make, kind, named, media, said, tmp_path) -> None:
    processor, model = make()
    loaded = load_processor(saved(tmp_path, processor, model.eval()))
    inputs = make_inputs(model, model.config, None, processor=loaded, tokens=512)
    assert (inputs.kind, loaded.fault) == (kind, "")
    assert inputs.description.startswith(said), inputs.description
    # Without torchvision the class is another of that name.
    assert inputs.description.rsplit(", through the checkpoint's ")[1].removesuffix("Pil") == named
    assert inputs.sequences == 8 and differ(inputs, media)
    for name in {"input_ids", "decoder_input_ids"} & inputs.batches[0].keys():
        assert differ(inputs, name), name
    results = [run(model, batch, torch.float32, "cpu").main for batch in inputs.batches[:2]]
    assert all(result.isfinite().all() for result in results)
    assert not torch.allclose(*results)


def test_places_of_images_stand_where_the_processor_puts_them(tmp_path) -> None:
    processor, model = qwen2_vl()
    loaded = load_processor(saved(tmp_path, processor, model.eval()))
    inputs = make_inputs(model, model.config, None, processor=loaded, tokens=512)
    ids = inputs.batches[0]["input_ids"][0]
    # 192 x 256 pixels become 84 x 112, which are 6 x 8 patches, of which four make one place.
    assert (ids == model.config.image_token_id).sum() == inputs.batches[0]["image_grid_thw"].prod() // 4 == 12
    assert int(ids[0]) == model.config.vision_start_token_id
    assert torch.equal(inputs.batches[0]["mm_token_type_ids"][0] == 1, ids == model.config.image_token_id)
    found = continuations(model, prompts_of(inputs), 3)
    assert [len(one.ids) for one in found] == [3] * 8


def test_what_the_model_does_not_run_on_gives_way_and_is_told(tmp_path) -> None:
    processor, model = whisper(seconds=5)
    loaded = load_processor(saved(tmp_path, processor, model.eval()))
    inputs = make_inputs(model, model.config, None, processor=loaded)
    assert inputs.description.startswith(
        "8 seeded audio inputs of shape 1 x 8 x 200; the checkpoint's WhisperProcessor is not used: "
    )
    assert "found 500" in inputs.description and inputs.batches[0]["input_features"].shape == (1, 8, 200)


def test_a_processor_that_does_not_load_is_told(tmp_path) -> None:
    _, model = vit()
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    model.config.save_pretrained(tmp_path)
    source = types.SimpleNamespace(path=tmp_path, trust_remote_code=False)
    loaded = load_processor(source)
    assert loaded.tool is None and loaded.fault
    inputs = make_inputs(model.eval(), model.config, None, processor=loaded)
    assert f"; the checkpoint's processor is not used: {loaded.fault}" in inputs.description
    (tmp_path / "preprocessor_config.json").unlink()
    assert load_processor(source) is None
    assert "processor" not in make_inputs(model, model.config).description


def test_a_processor_that_makes_nothing_for_the_model_is_told() -> None:
    _, model = vit()
    loaded = Processor(transformers.Wav2Vec2FeatureExtractor())
    assert list(processed(loaded, model, model.config, [], 2, 0)) == []
    assert loaded.fault == "it makes nothing that the model reads"


def test_a_processor_that_fails_is_told() -> None:
    class Broken:
        model_input_names = ("pixel_values",)

        def __call__(self, **_):
            raise ValueError("no such size")

    _, model = vit()
    inputs = make_inputs(model.eval(), model.config, processor=Processor(Broken()))
    assert inputs.description == (
        "8 seeded image inputs of shape 1 x 3 x 16 x 16; the checkpoint's Broken is not used: no such size"
    )


def test_pictures_and_sounds_repeat_and_differ() -> None:
    assert picture(0).shape == (192, 256, 3) and picture(0).dtype == np.uint8
    assert np.array_equal(picture(3), picture(3)) and not np.array_equal(picture(3), picture(4))
    # Smooth but for some edges: most neighbours are near, some are not.
    steps = np.abs(np.diff(picture(0).astype(int), axis=1))
    assert np.median(steps) < 16 and steps.max() > 60 and picture(0).std() > 20
    assert sound(0, 8000).shape == (16000,) and sound(0, 8000).dtype == np.float32
    assert np.array_equal(sound(1, 8000), sound(1, 8000)) and not np.array_equal(sound(1, 8000), sound(2, 8000))
    spectrum = np.abs(np.fft.rfft(sound(0, 8000)))
    assert spectrum.max() > 30 * np.median(spectrum) and np.abs(sound(0, 8000)).max() <= 1
