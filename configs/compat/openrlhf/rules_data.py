"""Rules of configs/openrlhf.yaml for files, columns, lengths and validation."""

from collections.abc import Iterator

from configs.base.keys import ConfigError
from configs.compat.openrlhf.arguments import Arguments
from configs.compat.openrlhf.entries import Entry, implied, mapped, none

FILES = (".parquet", ".jsonl", ".json")
ON_DISK = ("/", "./", "../", "~")
WRITE_IT = "a data set is written as a file with our columns first: docs/coming_from_openrlhf.md, Data"


def files_of(text: str, split: str) -> list[str]:
    """Paths of data sets after conversion to files: data/<name>/<split>.parquet; names of files are kept."""
    found = []
    for name in text.split(","):
        directory = name if name.startswith(ON_DISK) else f"data/{name}"
        found.append(name if name.endswith(FILES) else f"{directory.rstrip('/')}/{split}.parquet")
    return found


def _entry(arguments: Arguments, name: str, split: str, key: str) -> Iterator[Entry]:
    text = arguments.text(name)
    if text:
        files = files_of(text, arguments.text(split) or "train")
        yield mapped((name, split), {key: files}, "" if files == text.split(",") else WRITE_IT)
    elif arguments.has(split):
        yield none((split,), f"it goes with {name}")


def prompt_files(arguments: Arguments) -> Iterator[Entry]:
    yield from _entry(arguments, "prompt_data", "prompt_split", "data.train_files")


def training_files(arguments: Arguments) -> Iterator[Entry]:
    split = "train_split" if arguments.has("train_split") else "dataset_split"
    yield from _entry(arguments, "dataset", split, "data.train_files")


def answered_files(arguments: Arguments) -> Iterator[Entry]:
    yield from _entry(arguments, "dataset", "dataset_split", "data.path")


def training_samples(arguments: Arguments) -> Iterator[Entry]:
    if arguments.has("max_samples"):
        said = "these are drawn; there they are the first"
        yield mapped(("max_samples",), {"data.train_max_samples": arguments.count("max_samples")}, said)


def answered_samples(arguments: Arguments) -> Iterator[Entry]:
    if arguments.has("max_samples"):
        yield mapped(("max_samples",), {"data.max_samples": arguments.count("max_samples")})


def ptx(arguments: Arguments) -> Iterator[Entry]:
    names = ("pretrain_data", "pretrain_split", "ptx_coef")
    text = arguments.text("pretrain_data")
    if text:
        files = files_of(text, arguments.text("pretrain_split") or "train")
        settings = {"data.ptx_files": files, "actor_rollout_ref.actor.ptx_coef": arguments.text("ptx_coef")}
        yield mapped(names, settings, WRITE_IT)
    elif typed := [name for name in names if arguments.has(name)]:
        yield none(typed, "it goes with pretrain_data")


def lengths(arguments: Arguments) -> Iterator[Entry]:
    """Maximum lengths: the older command line limits prompt and response, the newer one their sum and the response."""
    names: tuple[str, ...] = ("prompt_max_len", "generate_max_len")
    said = "a longer prompt loses its end, as there"
    if not arguments.newer:
        prompt, response = arguments.count("prompt_max_len"), arguments.count("generate_max_len")
        if arguments.has("max_len"):
            yield none(("max_len",), "it follows from prompt_max_len and generate_max_len")
    else:
        names, total = ("max_len", "generate_max_len"), arguments.count("max_len")
        typed = arguments.has("generate_max_len")
        response = arguments.count("generate_max_len") if typed else total // 2
        prompt = total - response
        if prompt < 1:
            raise ConfigError(
                f"--{arguments.spelt('max_len')} {total}: leaves {prompt} tokens to a prompt ({total} - {response})"
            )
        share = "" if typed else ", half of it where no flag bounds the answer"
        names = names if typed else ("max_len",)
        said = f"prompts have {total} - {response} = {prompt}{share}; {said}"
    settings = {"data.max_prompt_length": prompt, "data.max_response_length": response, "data.truncation": "right"}
    yield mapped(names, settings, said)


def validation(arguments: Arguments) -> Iterator[Entry]:
    """Validation of PPO."""
    names = ("eval_dataset", "eval_split", "eval_steps", "eval_temperature", "eval_n_samples_per_prompt")
    text = arguments.text("eval_dataset")
    if not text:
        if typed := [name for name in names if arguments.has(name)]:
            yield implied(typed, "nothing is validated without an eval_dataset")
        train = files_of(arguments.text("prompt_data") or "", arguments.text("prompt_split") or "train")
        settings = {"data.val_files": train, "data.val_max_samples": 1, "trainer.test_freq": -1}
        yield mapped((), settings, "nothing is validated, but the key wants a file that is there")
        return
    files = files_of(text, arguments.text("eval_split") or "train")
    temperature = arguments.number("eval_temperature")
    sampling = "actor_rollout_ref.rollout.val_kwargs"
    settings = {
        "data.val_files": files,
        "trainer.test_freq": arguments.count("eval_steps"),
        f"{sampling}.do_sample": temperature > 0,
        f"{sampling}.temperature": arguments.text("eval_temperature"),
        f"{sampling}.n": arguments.text("eval_n_samples_per_prompt"),
    }
    yield mapped(names, settings, "" if files == text.split(",") else WRITE_IT)


def held_out(arguments: Arguments) -> Iterator[Entry]:
    """Validation of supervised training."""
    text, steps = arguments.text("eval_dataset"), arguments.count("eval_steps")
    names = ("eval_dataset", "eval_split", "eval_steps")
    if not text:
        if typed := [name for name in names if arguments.has(name)]:
            yield implied(typed, "nothing is validated without an eval_dataset")
        return
    files = files_of(text, arguments.text("eval_split") or "train")
    once = "-1 is once an epoch there and never here; " if steps < 0 else ""
    said = once + ("" if files == text.split(",") else WRITE_IT)
    yield mapped(names, {"data.val_files": files, "trainer.test_freq": steps}, said.removesuffix("; "))


def columns(arguments: Arguments) -> Iterator[Entry]:
    """Columns that train_sft trains on: a response column, or the assistant's turns of conversations."""
    names = ("input_key", "output_key", "apply_chat_template", "multiturn")
    prompt, answer = arguments.text("input_key"), arguments.text("output_key")
    chats = arguments.has("apply_chat_template") or arguments.has("multiturn")
    if answer and not arguments.has("multiturn"):
        said = "messages go through the chat template, a plain text is taken as it is; write it as messages" if chats else ""
        yield mapped(names, {"data.prompt_key": prompt, "data.response_key": answer}, said)
    elif chats:
        said = (
            ""
            if arguments.has("multiturn")
            else "all of the assistant's turns are learnt; there the last alone, without --multiturn"
        )
        yield mapped(names, {"data.messages_key": prompt}, said)
    else:
        used = [name for name in names if arguments.has(name)] or ["input_key"]
        yield none(used, "a text without an answer is not learnt; give it an empty prompt and itself as the response")
