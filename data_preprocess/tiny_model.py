"""Create a small model with random weights and a character tokenizer, for tests and experiments.

python -m data_preprocess.tiny_model --save_dir DIR writes a Hugging Face directory for AutoTokenizer and AutoModelForCausalLM.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config
from transformers.utils import logging

ARCHITECTURES: dict[str, type[PretrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
PAD, EOS = "<pad>", "<eos>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Append-only: every message is rendered by itself. A tool's name stands for its schema, which has hundreds of characters.
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | map(attribute='function.name') | join(' ') }}</tools>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Tools, and calls in the format hermes."""


def character_tokenizer(alphabet: str | None, words: Sequence[str] = (), *, with_tools: bool = False) -> PreTrainedTokenizerFast:
    """Tokenizer with one id per character (per byte outside ASCII), after <pad> and <eos>; None: every byte, for any text.

    Characters outside the alphabet are dropped. words: texts that are one token each. The chat template concatenates the contents
    of the messages; with_tools: it is TOOL_TEMPLATE, and each of its tags and roles is a token.
    """
    # A byte-level BPE without merges, since transformers rebuilds one from the vocabulary for every model of type qwen2, whatever
    # tokenizer.json contains. <pad> is also the unk token: without one, transformers adds its own, outside the vocabulary.
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = sorted(to_bytes.alphabet()) if alphabet is None else dict.fromkeys(to_bytes.pre_tokenize_str(alphabet)[0][0])
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([PAD, EOS, *symbols])}, []))
    tokenizer.pre_tokenizer = to_bytes
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=PAD,
        eos_token=EOS,
        chat_template=TOOL_TEMPLATE if with_tools else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    tags, roles = (TAGS, ROLES) if with_tools else ((), ())
    # Tags are no special tokens, as in Qwen: they remain in a decoded response, which the parser and the reward function read.
    made.add_tokens([AddedToken(word, normalized=False) for word in (*tags, *words)])
    made.add_tokens([AddedToken(role, normalized=False, special=True) for role in roles])
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Create a small model with random weights and a character tokenizer")
    parser.add_argument("--save_dir", required=True, help="directory to write")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen2", help="(default: %(default)s)")
    parser.add_argument("--alphabet", default="0123456789=", help="characters of the vocabulary (default: %(default)s)")
    parser.add_argument("--bytes", action="store_true", help="byte vocabulary for any text, instead of --alphabet")
    parser.add_argument("--words", nargs="+", default=[], help="texts that are one token each, besides the characters")
    parser.add_argument("--tools", action="store_true", help="chat template with tools, and calls in the format hermes")
    parser.add_argument("--hidden_size", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--num_hidden_layers", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--num_attention_heads", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--num_key_value_heads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--intermediate_size", type=int, default=288, help="(default: %(default)s)")
    parser.add_argument("--max_position_embeddings", type=int, default=1024, help="longest sequence (default: %(default)s)")
    parser.add_argument("--tie_word_embeddings", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.hidden_size % args.num_attention_heads or args.num_attention_heads % args.num_key_value_heads:
        parser.error(
            f"hidden_size {args.hidden_size} must be divisible by num_attention_heads {args.num_attention_heads}, "
            f"and that by num_key_value_heads {args.num_key_value_heads}"
        )

    tokenizer = character_tokenizer(None if args.bytes else args.alphabet, args.words, with_tools=args.tools)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_hidden_layers,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_key_value_heads,
        "head_dim": args.hidden_size // args.num_attention_heads,
        "intermediate_size": args.intermediate_size,
        "max_position_embeddings": args.max_position_embeddings,
        "tie_word_embeddings": args.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = ARCHITECTURES[args.architecture](**sizes)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = Path(args.save_dir).expanduser()
    logging.disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    print(f"{path}: {args.architecture}, {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
