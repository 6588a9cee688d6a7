"""What is found for models that take images, sounds and series in less usual forms."""

import types

import pytest
import torch
import transformers
from torch import nn

from normswap import candidates
from normswap.errors import ModelError
from normswap.inputs import make_inputs

Settings = types.SimpleNamespace


def found(model, **settings):
    inputs = make_inputs(model, Settings(**settings), sequences=2, length=16)
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in inputs.batches[0].items()}
    return inputs.kind, shapes


class Text(nn.Module):
    """Text beside which stands something else."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.see = nn.Linear(width, 8)

    def get_input_embeddings(self):
        return self.embed


@pytest.mark.core
def test_an_image_has_many_names():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 16)

        def forward(self, image):
            return self.conv(image)

    class Unnamed(Named):
        def forward(self, hidden_states):
            return self.conv(hidden_states)

    assert found(Named(), image_size=32) == ("image", {"image": (1, 3, 32, 32)})
    assert found(Unnamed(), image_size=32) == ("image", {"hidden_states": (1, 3, 32, 32)})


@pytest.mark.core
def test_a_module_that_maps_and_convolves_gets_rows():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 3, padding=1)
            self.see = nn.Linear(8, 8)

        def forward(self, hidden_states):
            return self.see(self.conv(hidden_states[:, None])[:, 0])

    assert found(Both()) == ("tensor", {"hidden_states": (1, 32, 8)})


@pytest.mark.core
def test_a_spectrogram_may_be_called_mel():
    class Mel(Text):
        def forward(self, audio_mel, audio_mel_mask):
            return self.see(audio_mel) * audio_mel_mask[..., None]

    class Spectrogram(Text):
        def forward(self, mel_spectrogram):
            return self.see(mel_spectrogram)

    assert found(Spectrogram(80), num_mel_bins=80)[0] == "audio"
    assert found(Mel(80), num_mel_bins=80) == ("audio", {"audio_mel": (1, 256, 80), "audio_mel_mask": (1, 256)})


@pytest.mark.core
def test_text_is_tried_however_long_images_were_searched_for(monkeypatch):
    class Blind(Text):
        def forward(self, input_ids, pixel_values=None):
            if pixel_values is not None:
                raise ValueError(f"sees nothing of {pixel_values.numel()} pixels")
            return self.embed(input_ids)

    for limit in ("_ALL", "_NUMBERS"):
        with monkeypatch.context() as patched:
            patched.setattr(candidates, limit, 1)
            assert found(Blind(), image_size=16) == ("ids", {"input_ids": (1, 16)})


@pytest.mark.core
def test_patches_are_rows_without_a_grid_too():
    class Rows(Text):
        def forward(self, input_ids, pixel_values):
            if pixel_values.dim() != 2:
                raise ValueError("expected rows")
            return self.embed(input_ids) + self.see(pixel_values).mean(0)

    assert found(Rows(48), patch_size=4) == ("ids+image", {"input_ids": (1, 16), "pixel_values": (64, 48)})


@pytest.mark.core
def test_patches_with_several_times_stand_in_a_batch():
    class Batched(Text):
        def forward(self, pixel_values, image_grid_thw):
            if pixel_values.dim() != 3 or pixel_values.shape[2] != self.see.in_features:
                raise ValueError("expected a batch of patches")
            count = int(image_grid_thw.prod())
            return self.see(pixel_values[:, :count]) + torch.zeros(1, count, 8)

    kind, shapes = found(Batched(96), patch_size=4, temporal_patch_size=2)
    assert (kind, shapes["pixel_values"]) == ("image", (1, 64, 96))


@pytest.mark.core
@pytest.mark.parametrize("merge", [1, 2])
def test_patches_have_their_channels_last(merge):
    class Last(Text):
        def forward(self, pixel_values):
            _, _, height, width, _ = pixel_values.shape
            if height != 4 * merge or width != 4 * merge:
                raise ValueError("expected patches")
            return self.see(pixel_values)

    kind, shapes = found(Last(3), patch_size=4, temporal_patch_size=2, spatial_merge_size=2)
    assert kind == "image" and shapes["pixel_values"][1:] == (2, 4 * merge, 4 * merge, 3)


@pytest.mark.core
def test_the_size_of_an_image_is_told_in_patches():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 4, 4)

        def forward(self, pixel_values, target_sizes=None):
            rows = self.conv(pixel_values).flatten(2)
            return rows + torch.cat([torch.zeros(height * width) for height, width in target_sizes.tolist()])

    assert found(Sized(), image_size=32, patch_size=4)[1] == {"pixel_values": (1, 3, 32, 32), "target_sizes": (1, 2)}


@pytest.mark.core
def test_an_image_grows_to_the_tokens_that_are_wanted():
    class Exact(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 16, 16)

        def forward(self, pixel_values):
            tokens = self.conv(pixel_values).flatten(2)
            if tokens.shape[2] != 400:
                raise ValueError(f"expected (batch, 400), got {tuple(tokens[:, 0].shape)}")
            return tokens

    assert found(Exact()) == ("image", {"pixel_values": (1, 3, 320, 320)})


@pytest.mark.core
def test_an_image_grows_until_enough_can_be_chosen():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 16, 16)

        def forward(self, pixel_values):
            return self.conv(pixel_values).flatten(2).topk(300).values

    assert found(Chosen(), image_size=64)[1] == {"pixel_values": (1, 3, 448, 448)}


@pytest.mark.core
def test_flattened_patches_begin_with_their_row_and_column():
    class Flat(Text):
        def forward(self, flattened_patches):
            row, column = flattened_patches[..., 0].long(), flattened_patches[..., 1].long()
            return self.see(flattened_patches[..., 2:]) + self.embed(row) + self.embed(column)

    inputs = make_inputs(Flat(20), Settings(patch_size=4, patch_embed_hidden_size=20), sequences=2)
    patches = inputs.batches[0]["flattened_patches"][0]
    assert patches.shape == (64, 22) and patches[9, :2].tolist() == [2, 2]


@pytest.mark.core
def test_a_mask_says_which_token_sees_which_image():
    class Crossed(Text):
        def forward(self, input_ids, pixel_values, image_attention_mask=None):
            seen = self.see(pixel_values).mean((2, 3, 4))
            if image_attention_mask.size(-1) != seen.shape[1]:
                raise ValueError("expected as many images")
            return self.embed(input_ids) + image_attention_mask.to(seen.dtype) @ seen[..., None]

    kind, shapes = found(Crossed(32), image_size=32)
    assert kind == "ids+image" and shapes["image_attention_mask"] == (1, 16, shapes["pixel_values"][1])


@pytest.mark.core
def test_ids_have_as_many_codebooks_as_the_configuration_says():
    class Codes(Text):
        def forward(self, input_ids):
            batch, length = input_ids.size()[:-1]
            return self.embed(input_ids + torch.zeros(9, dtype=torch.long)).view(batch, length, 72)

    assert found(Codes(), num_channels=9) == ("ids", {"input_ids": (1, 16, 9)})


@pytest.mark.core
def test_whole_numbers_and_indices_are_given():
    class Counted(Text):
        def forward(self, inputs_embeds, num_patches: int, pooled_idx):
            return self.see(inputs_embeds)[:, pooled_idx.flatten()] * range(9)[num_patches]

    assert found(Counted(), hidden_size=8)[1]["pooled_idx"] == (1, 6)


@pytest.mark.core
def test_a_series_needs_no_future():
    config = transformers.AutoformerConfig(
        prediction_length=4, context_length=8, label_length=10, lags_sequence=[1, 2], d_model=16, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    model = transformers.AutoformerModel(config).eval()
    inputs = make_inputs(model, config, sequences=2)
    assert inputs.kind == "series" and "future_values" not in inputs.batches[0]


@pytest.mark.core
def test_what_fits_no_form_is_still_refused():
    class Never(Text):
        def forward(self, input_ids, pixel_values):
            raise ValueError("nothing fits")

    with pytest.raises(ModelError, match=r"found no inputs that Never runs on"):
        found(Never(), image_size=16)
