"""The tokenizer, and the tokens that end an answer. All tokenizers live on the controller."""

import os
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from configs.schema.common import ModelConfig, TokenizedModelConfig
from workers.engine.hf_model import check_own_code
from workers.model_path import hush_hub


def load_tokenizer(model: TokenizedModelConfig) -> PreTrainedTokenizerBase:
    """That of ``tokenizer_path``, or of the model, with the chat template asked for. Raises ValueError if one is not there."""
    path = os.path.expanduser(model.tokenizer_path or model.path)
    hush_hub()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            check_own_code(path, error)
        what = "" if os.path.isdir(path) else "there is no such directory, and as a hub name: "
        raise ValueError(f"no tokenizer at {path}: {what}{' '.join(str(error).split())}") from error
    if model.custom_chat_template is not None:
        tokenizer.chat_template = _template(model.custom_chat_template)
    return tokenizer


def _template(text: str) -> str:
    """The template itself, or what is in the file behind an @."""
    if not text.startswith("@"):
        return text
    file = Path(text[1:]).expanduser()
    if not file.is_file():
        raise ValueError(f"custom_chat_template={text}: no such file; behind @ stands a file that has a Jinja template")
    return file.read_text(encoding="utf-8")


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's EOS, and those of the model's generation_config.json, if it has one."""
    path = os.path.expanduser(model.path)
    try:
        of_model = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # no such file: the tokenizer alone decides
        of_model = None
    ids = [tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])]
    stops = tuple(sorted({token for token in ids if token is not None}))
    if not stops:
        raise ValueError(f"neither the tokenizer nor generation_config.json of {path} names an EOS token: no answer could end")
    return stops
