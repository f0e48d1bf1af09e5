"""Byte-level tokenizers built in memory, and the data configuration of their tests."""

from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from configs.schema.ppo import CustomDatasetConfig, DataConfig
from data_preprocess.tiny_model import EOS, character_tokenizer

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}{{ tail }}"
)


def byte_tokenizer(*, chat_template: str | None = CHAT, bos: bool = False) -> PreTrainedTokenizerFast:
    """Tokenizer of any text, one token per byte. bos: prepend <eos> to plain text, as Llama's tokenizer prepends BOS."""
    tokenizer = character_tokenizer(None)
    tokenizer.chat_template = chat_template
    if bos:
        before = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.eos_token_id)])
        tokenizer.backend_tokenizer.post_processor = before
    return tokenizer


def data_config(**changes: Any) -> DataConfig:
    keys: dict[str, Any] = {
        "train_files": [],
        "val_files": [],
        "custom_cls": CustomDatasetConfig(path=None, name=None),
        "train_max_samples": -1,
        "val_max_samples": -1,
        "prompt_key": "prompt",
        "reward_fn_key": "data_source",
        "train_batch_size": 4,
        "gen_batch_size": None,
        "val_batch_size": None,
        "max_prompt_length": 64,
        "max_response_length": 8,
        "truncation": "error",
        "filter_overlong_prompts": False,
        "filter_overlong_prompts_workers": 1,
        "shuffle": True,
        "seed": None,
        "apply_chat_template_kwargs": {},
        "ptx_files": None,
        "ptx_prompt_key": "prompt",
        "ptx_response_key": "response",
        "ptx_max_length": 64,
        "ptx_truncation": "right",
    }
    return DataConfig(**(keys | changes))


def merging_tokenizer(corpus: str, *added: str | AddedToken, chat_template: str = CHAT) -> PreTrainedTokenizerFast:
    """Byte-level BPE without pre-tokenisation, trained on ``corpus``: merges span words, newlines and the text of markup.

    added: its added tokens, with ids from 0.
    """
    model = Tokenizer(BPE())
    model.pre_tokenizer, model.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    model.add_special_tokens(list(added))
    alphabet = ByteLevel.alphabet()
    model.train_from_iterator(
        [corpus],
        BpeTrainer(
            vocab_size=len(added) + len(alphabet) + 256,
            initial_alphabet=alphabet,
            special_tokens=list(added),
            show_progress=False,
            max_token_length=6,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, chat_template=chat_template, clean_up_tokenization_spaces=False)
