"""Loading of tokenizers, and the tokens that end a response.

Tokenizers live on the controller; replicas that decode responses get a copy.
"""

import os
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from configs.schema.common import ModelConfig, TokenizedModelConfig
from workers.engine.hf.hf_model import check_own_code
from workers.model_path import silence_hub


def load_tokenizer(model: TokenizedModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``tokenizer_path`` (default: the model's) with the configured chat template.

    Raises ValueError, one line, if tokenizer or template do not exist or need code that is not trusted.
    """
    path = os.path.expanduser(model.tokenizer_path or model.path)
    silence_hub()
    try:
        # transformers raises OSError for a path that does not exist and ValueError for a directory without tokenizer files or
        # with code of its own; the last one has a remedy of its own.
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
    """The Jinja template ``text``, or the contents of the file that it names as @FILE."""
    if not text.startswith("@"):
        return text
    file = Path(text[1:]).expanduser()
    if not file.is_file():
        raise ValueError(f"custom_chat_template={text}: no such file; after @, name a file with a Jinja template")
    return file.read_text(encoding="utf-8")


def can_be_sent(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether other processes can unpickle the tokenizer: a class from a model's own code is not importable there."""
    return isinstance(tokenizer, PreTrainedTokenizerFast) and type(tokenizer).__module__.startswith("transformers.")


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> tuple[int, ...]:
    """Token ids that end a response: the tokenizer's EOS and those in the model's generation_config.json, if present.

    Raises ValueError if there are none.
    """
    path = os.path.expanduser(model.path)
    # Both, since instruct models often end a turn with a token that only one of the two files names (Llama 3: <|eot_id|>).
    try:
        generation_eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # no such file: the tokenizer alone decides
        generation_eos = None
    ids = [tokenizer.eos_token_id, *(generation_eos if isinstance(generation_eos, list) else [generation_eos])]
    stops = tuple(sorted({token for token in ids if token is not None}))
    if not stops:
        raise ValueError(f"neither the tokenizer nor generation_config.json of {path} names an EOS token: no response could end")
    return stops
