from transformers import PretrainedConfig


class MisleadingConfig(PretrainedConfig):
    model_type = "misleading_of_the_tests"

    def __init__(self, hidden_size: int = 32, num_hidden_layers: int = 2, vocab_size: int = 96, **kwargs):
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.vocab_size = vocab_size
        super().__init__(**kwargs)
