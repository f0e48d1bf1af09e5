"""Base class that verl has for data sets of prompts, for classes of the user (data.custom_cls)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
