"""Prompts of the run, tokenised when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.schema.ppo import PromptConfig
from trainer.data.encoding import Messages, encode_all, truncate
from trainer.data.files import Rows, value_of
from trainer.data.order import draw


@dataclass(frozen=True, slots=True)
class Prompt:
    """uid: the row in the files end to end, whatever was filtered. text: what prompt_ids say, before any truncation.

    messages: what the row has, a text or a conversation.
    """

    uid: int
    prompt_ids: tuple[int, ...]
    text: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: Messages


class PromptDataset:
    """Prompts of one or several files, of ``data.max_prompt_length`` tokens at most. n_rows: of the files."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: PromptConfig,
        *,
        max_samples: int,
        seed: int,
        scored: bool = True,
    ) -> None:
        """max_samples: read so many rows, drawn by ``seed`` if data.shuffle, else the first; -1: all.

        scored: the rows must have what a scorer needs, a data source and a ground truth; else they may, and "" and None stand
        for what a file has not.

        Raises ValueError, one line, for missing files, columns or rows, for an empty prompt, for a prompt that is too long under
        data.truncation=error, and where the filter leaves nothing.
        """
        self._source_key, self._prompt_key = config.reward_fn_key, config.prompt_key
        needed = [config.reward_fn_key, "reward_model.ground_truth"] if scored else []
        self._rows = Rows(files, [config.prompt_key, *needed], [config.reward_fn_key, "reward_model", "extra_info"])
        self.n_rows = len(self._rows)
        sources = self._rows.column(config.reward_fn_key)
        notices = []
        uids = draw(len(self._rows), max_samples, seed, config.shuffle)
        if not uids:
            raise ValueError(f"max_samples={max_samples} leaves no prompt; -1 is all")
        column = self._rows.column(config.prompt_key)
        asked = config.filter_overlong_prompts_workers if config.filter_overlong_prompts else 1
        workers = asked if asked > 1 else None  # the default is no wish for one process
        encoded = encode_all(tokenizer, [column[uid] for uid in uids], config.apply_chat_template_kwargs, workers)
        for uid, (_, ids) in zip(uids, encoded, strict=True):
            if not len(ids):
                raise ValueError(f"{self._rows.where(uid)}: the prompt is empty; leave the row out")
        long = [uid for uid, (_, ids) in zip(uids, encoded, strict=True) if len(ids) > config.max_prompt_length]
        if long:
            count = f"{len(long)} of {len(uids)} prompts are longer than data.max_prompt_length={config.max_prompt_length} tokens"
            if config.filter_overlong_prompts:
                if len(long) == len(uids):
                    raise ValueError(f"{count}: data.filter_overlong_prompts leaves nothing; raise it")
                notices.append(f"{count} and are dropped")
                gone = set(long)
                kept = [i for i, uid in enumerate(uids) if uid not in gone]
                uids, encoded = [uids[i] for i in kept], [encoded[i] for i in kept]
            elif config.truncation == "error":
                raise ValueError(
                    f"{count}, the first in {self._rows.where(long[0])}: set data.filter_overlong_prompts=true, or "
                    "data.truncation=left, right or middle, or raise data.max_prompt_length"
                )
            else:
                how = config.truncation
                notices.append(f"{count} and are cut (data.truncation={how})")
                encoded = [(text, truncate(ids, config.max_prompt_length, how)) for text, ids in encoded]
        self._uids = uids
        self._texts = [text for text, _ in encoded]
        self._ids = [ids for _, ids in encoded]
        self.data_sources = frozenset(sources[uid] or "" for uid in uids)
        self.notices = tuple(notices)

    def __len__(self) -> int:
        return len(self._uids)

    def check_tokens(self, vocab_size: int) -> None:
        """Raises ValueError, naming the row, if a prompt has a token that the model's vocabulary has not."""
        for uid, ids in zip(self._uids, self._ids, strict=True):
            if ids.max() >= vocab_size:
                raise ValueError(
                    f"{self._rows.where(uid)}: the tokenizer makes token {ids.max()} of the prompt, and the model's vocabulary "
                    f"has {vocab_size}; set actor_rollout_ref.model.tokenizer_path to the model's"
                )

    def row(self, index: int) -> dict[str, Any]:
        """The prompt's row, as the file has it."""
        return self._rows[self._uids[index]]

    def __getitem__(self, index: int) -> Prompt:
        row = self.row(index)
        return Prompt(
            uid=self._uids[index],
            prompt_ids=tuple(self._ids[index].tolist()),
            text=self._texts[index],
            data_source=row.get(self._source_key) or "",
            ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
            extra_info=row.get("extra_info") or {},
            messages=value_of(row, self._prompt_key),
        )
