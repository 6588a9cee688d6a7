from transformers import PretrainedConfig


class PictureConfig(PretrainedConfig):
    model_type = "picture_of_the_tests"

    def __init__(self, hidden_size: int = 24, num_channels: int = 3, image_size: int = 32, **kwargs):
        self.hidden_size = hidden_size
        self.num_channels = num_channels
        self.image_size = image_size
        super().__init__(**kwargs)
