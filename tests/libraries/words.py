"""A tokenizer of whole words, made on the spot."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = """
    a an and animals apple are bird blue cat cats dog dogs eat far fish from green hear how is it like
    many music not of old on one red run sea see sing sleep small song the they to tree two water wind with you
""".split()  # noqa: SIM905
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def word_tokenizer(*, bert: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer of less than 64 words; with BERT's marks around a sentence where `bert`."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    assert len(vocabulary) <= 64
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bert:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=48,
    )
