"""Rows of a data set class of the user, in verl's form (data.custom_cls), and the base class that verl has for them.

The class decides what the rows are. Which of them are used, in which order, and what is too long is decided by PromptDataset, as
for files: verl's base class filters with its own rendering of the prompt, while the ids that count are those the policy gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from configs.schema.ppo import DataConfig
from trainer.data.files import value_of
from trainer.run.user_code import describe, load_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "data.custom_cls"


class RLHFDataset:
    """verl's data set of prompts: ``dataframe``, a data set of the package datasets, and a row of it with ``raw_prompt``.

    Subclasses override _read_files_and_tokenize, _build_messages or __getitem__. As in verl, all of __init__ has run up to the
    reading of the files when they are called.
    """

    dataframe: Any

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1, **kwargs: Any
    ) -> None:
        """data_files: one or several. config: the block ``data``, as OmegaConf has it."""
        self.data_files = [data_files] if isinstance(data_files, str) else [*data_files]
        self.original_data_files = [*self.data_files]
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.prompt_key = config.get("prompt_key", "prompt")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.truncation = config.get("truncation", "error")
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", True)
        self.apply_chat_template_kwargs = config.get("apply_chat_template_kwargs", {})
        self.num_workers = config.get("filter_overlong_prompts_workers", 1)
        self.shuffle, self.seed = config.get("shuffle", False), config.get("seed")
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Files are read where they are."""
        self.data_files = [str(Path(name).expanduser()) for name in self.original_data_files]

    def _read_files_and_tokenize(self) -> None:
        import datasets

        kinds = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
        parts = [datasets.load_dataset(kinds[Path(name).suffix], data_files=name)["train"] for name in self.data_files]
        self.dataframe = self.maybe_filter_out_long_prompts(datasets.concatenate_datasets(parts))

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """All rows: PromptDataset filters them."""
        return dataframe

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
        return example[key or self.prompt_key]

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        row["raw_prompt"] = self._build_messages(row)
        extra = row["extra_info"] = row.get("extra_info") or {}
        row["index"] = extra.get("index", 0)
        return row | {name: extra.get(name) or {} for name in ("tools_kwargs", "interaction_kwargs")}


class ClassRows:
    """Rows of the class of data.custom_cls, all read at once; the methods are those of trainer.data.files.Rows."""

    def __init__(
        self,
        files: Sequence[str],
        required: Sequence[str],
        optional: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
    ) -> None:
        """required, optional: as in Rows. Raises ValueError, one line, for what the class cannot do, and for a missing column."""
        path, name = data.custom_cls.path, data.custom_cls.name
        assert path is not None and name is not None, "checked with the configuration"
        cls = load_class(path, name, f"{KEY}.path={path}")
        self._name = f"{KEY}.name={name}"
        wanted = {column.partition(".")[0] for column in required} | {*optional}
        try:
            config = OmegaConf.create(asdict(data))
            made = cls(data_files=[*files], tokenizer=tokenizer, config=config, processor=None, max_samples=-1)
            rows = [_row(made[i], data.prompt_key) for i in range(len(made))]
        except (Exception, SystemExit) as error:  # the user's class may raise anything
            raise ValueError(f"{self._name}: its rows cannot be read: {describe(error)}") from error
        if not rows:
            raise ValueError(f"{self._name}: it has no rows; check what it reads from {', '.join(files)}")
        for i, row in enumerate(rows):
            for column in required:
                if column.partition(".")[0] not in row or value_of(row, column) is None:
                    raise ValueError(f"{self._name}: row {i} has no {column}; its columns are {', '.join(row)}")
        self._rows = [{column: value for column, value in row.items() if column in wanted} for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> list[Any]:
        """All values of a column or ``column.field``."""
        return [value_of(row, name) if name.partition(".")[0] in row else None for row in self._rows]

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._rows[row]

    def where(self, row: int) -> str:
        """Location of a row for messages."""
        return f"{self._name}, row {row}"


def _row(row: dict[str, Any], prompt_key: str) -> dict[str, Any]:
    """The row with its messages in the prompt's column, and the arguments of tools and interactions in extra_info."""
    found = dict(row)
    if (messages := row.get("raw_prompt", row.get(prompt_key))) is not None:
        # A list, also of an array.
        found[prompt_key] = messages if isinstance(messages, str) else [dict(message) for message in messages]
    for name in ("tools_kwargs", "interaction_kwargs"):
        if row.get(name):
            found["extra_info"] = (found.get("extra_info") or {}) | {name: row[name]}
    return found
