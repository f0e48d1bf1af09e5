"""Prompt dataset of RL training, and the stream of its prompts in rounds.

All prompts are tokenised when the data set is constructed, to find those that are too long. Of a large data set the sizes are
cached, and when they are found, prompts are tokenised as they are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.load import untyped
from configs.schema.ppo import DataConfig, PromptConfig
from trainer.data.encoding import (
    RENDERING,
    Encoded,
    Messages,
    Refused,
    SizeCache,
    check_token,
    encode,
    encode_all,
    of_file,
    sizes_of,
    truncate,
    with_texts,
)
from trainer.data.files import STRUCTS, Rows, labels, value_of
from trainer.data.order import DataOrder, draw
from trainer.data.processes import MANY
from trainer.run.user_code import describe, load_class


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt with the columns that scoring needs.

    uid: index of the row over all files, before any filtering. text: the rendered prompt before truncation. messages: the row's
    prompt column, a text or a conversation. agent: column agent_name. ordinal: number of the prompt in the run, set by
    PromptStream; -1: not from a stream.
    """

    uid: int
    prompt_ids: tuple[int, ...]
    text: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: Messages
    agent: str | None = None
    ordinal: int = -1


class PromptDataset:
    """Prompts of one or several files with at most ``data.max_prompt_length`` tokens.

    n_rows: number of rows in the files. is_lazy: prompts are tokenised as they are drawn.
    """

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
        """max_samples: use only N rows, sampled with ``seed`` if data.shuffle, else the first N; -1: all.

        scored: rows must have the columns of a scorer, data source and ground truth; otherwise these are optional and default to
        "" and None.

        Rows are those of the files, or of the class of data.custom_cls.

        Raises ValueError, one line, for missing files, columns or rows, for an empty prompt, for a prompt that is too long with
        data.truncation=error, and if the filter removes all prompts.
        """
        self._source_key, self._prompt_key = config.reward_fn_key, config.prompt_key
        needed = [config.reward_fn_key, "reward_model.ground_truth"] if scored else []
        columns = [config.prompt_key, *needed], [config.reward_fn_key, "reward_model", "extra_info", "agent_name"]
        self._rows: Rows | ClassRows
        path, name = (config.custom_cls.path, config.custom_cls.name) if isinstance(config, DataConfig) else (None, None)
        if isinstance(config, DataConfig) and path is not None and name is not None:
            self._rows = ClassRows(files, *columns, tokenizer, config, path, name)
        else:
            self._rows = Rows(files, *columns, STRUCTS if scored else ("reward_model",))
        self.n_rows = len(self._rows)
        sources = labels(self._rows.column(config.reward_fn_key), config.reward_fn_key, self._rows.where)
        notices = []
        uids = draw(len(self._rows), max_samples, seed, config.shuffle)
        if not uids:
            raise ValueError(f"max_samples={max_samples} leaves no prompt; use -1 for all rows")
        self._tokenizer, self._config = tokenizer, config
        cache = None
        if isinstance(self._rows, Rows) and len(uids) >= MANY:
            # The largest token id is that of the truncated prompt.
            cut = None if config.truncation == "error" else [config.truncation, config.max_prompt_length]
            cache = SizeCache(files, uids, tokenizer, [RENDERING, config.prompt_key, config.apply_chat_template_kwargs, cut])
        sizes, encoded = None if cache is None else cache.read(), list[Encoded]()
        self.is_lazy = sizes is not None
        if sizes is None:
            column = self._rows.column(config.prompt_key)
            # The default of 1 stands for a number chosen by the size of the data (None), not for a single process.
            configured = config.filter_overlong_prompts_workers if config.filter_overlong_prompts else 1
            workers = configured if configured > 1 else None
            try:
                encoded = encode_all(tokenizer, [column[uid] for uid in uids], config.apply_chat_template_kwargs, workers)
            except Refused:
                self._name_refused([(uid, column[uid]) for uid in uids])
                raise
            sizes = sizes_of(encoded, [*map(self._truncated, encoded)])
            if cache is not None:
                cache.write(sizes)
        elif cache is not None:
            notices.append(f"{len(uids):,} prompts are tokenised as they are drawn; their lengths are from {cache.path}")
        if len(empty := np.flatnonzero(sizes[:, 0] == 0)):
            raise ValueError(f"{self._rows.where(uids[empty[0]])}: the prompt is empty; remove the row")
        is_long = sizes[:, 0] > config.max_prompt_length
        if is_long.any():
            long = np.flatnonzero(is_long)
            count = f"{len(long)} of {len(uids)} prompts are longer than data.max_prompt_length={config.max_prompt_length} tokens"
            if config.filter_overlong_prompts:
                if len(long) == len(uids):
                    raise ValueError(f"{count}: data.filter_overlong_prompts leaves no prompt; raise data.max_prompt_length")
                notices.append(f"{count} and are dropped")
                kept, sizes = np.flatnonzero(~is_long).tolist(), sizes[~is_long]
                uids, encoded = [uids[i] for i in kept], [encoded[i] for i in kept if encoded]
            elif config.truncation == "error":
                raise ValueError(
                    f"{count}, the first in {self._rows.where(uids[long[0]])}: set data.filter_overlong_prompts=true, or "
                    "data.truncation=left, right or middle, or raise data.max_prompt_length"
                )
            else:
                side = config.truncation
                notices.append(f"{count} and are truncated (data.truncation={side})")
        self._uids, self._encoded, self._largest_ids = uids, [*map(self._truncated, encoded)], sizes[:, 1]
        self.data_sources = frozenset(sources[uid] for uid in uids)
        if scored:
            truths = self._rows.column("reward_model.ground_truth")
            without = [uid for uid in uids if truths[uid] is None]
            # Where no row has one, the reward function needs none.
            if 0 < len(without) < len(uids):
                first = self._rows.where(without[0])
                notices.append(f"{len(without)} of {len(uids)} rows have no ground truth, the first is {first}")
        self.notices = tuple(notices)

    def __len__(self) -> int:
        return len(self._uids)

    def _name_refused(self, prompts: Sequence[tuple[int, Any]]) -> None:
        """Raise Refused for the first of (row, prompt) that the chat template rejects, with the place of the row."""
        for uid, prompt in prompts:
            try:
                encode(self._tokenizer, [prompt], self._config.apply_chat_template_kwargs)
            except Refused as error:
                raise Refused(f"{self._rows.where(uid)}: {error}") from error

    def check_tokens(self, vocab_size: int) -> None:
        """Raise ValueError, naming the row, if a prompt contains a token outside the model's vocabulary."""
        for i in np.flatnonzero(self._largest_ids >= vocab_size)[:1].tolist():
            where = self._rows.where(self._uids[i])
            check_token(where, "the prompt", self._largest_ids[i], vocab_size, "actor_rollout_ref.model")

    def row(self, index: int) -> dict[str, Any]:
        """The unmodified row of the file for the prompt at ``index``."""
        return self._rows[self._uids[index]]

    def __getitem__(self, index: int) -> Prompt:
        row = self.row(index)
        if self.is_lazy:
            prompt = value_of(row, self._prompt_key)
            (encoded,) = encode(self._tokenizer, [prompt], self._config.apply_chat_template_kwargs)
            text, ids = self._truncated(encoded)
        else:
            text, ids = self._encoded[index]
        return Prompt(
            uid=self._uids[index],
            prompt_ids=tuple(ids.tolist()),
            text=text,
            data_source=row.get(self._source_key) or "",
            ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
            extra_info=row.get("extra_info") or {},
            messages=of_file(with_texts(value_of(row, self._prompt_key))),
            agent=row.get("agent_name"),
        )

    def _truncated(self, encoded: Encoded) -> Encoded:
        """The prompt as it is asked. Without data.truncation=left, right or middle none is too long."""
        (text, ids), how = encoded, self._config.truncation
        return encoded if how == "error" else (text, truncate(ids, self._config.max_prompt_length, how))


@dataclass(slots=True)
class PromptStream:
    """Prompts in data order, in rounds of ``order.batch_size``. No prompt repeats within an epoch.

    A step takes one round, or with algorithm.filter_groups as many as it needs to fill its batch. Partial rollouts take single
    prompts. The only state is the position: ``drawn``, the number of complete rounds so far, and ``taken``, the number of prompts
    taken of the next round. A prompt's ordinal is drawn * order.batch_size + taken at the time it is taken: it is unique in the
    run, where ``uid`` repeats every epoch.
    """

    data: PromptDataset
    order: DataOrder
    drawn: int = 0
    taken: int = 0

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self.drawn // self.rounds_per_epoch

    @property
    def rounds_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def draw(self) -> list[Prompt]:
        """Prompts of the next round. Raises RuntimeError if single prompts of it were taken."""
        if self.taken:
            raise RuntimeError(f"round {self.drawn}: {self.taken} of {self.order.batch_size} prompts were taken with draw_one")
        first, rows = self.drawn * self.order.batch_size, self.order.batch(self.drawn)
        self.drawn += 1
        return [replace(self.data[row], ordinal=first + place) for place, row in enumerate(rows)]

    def draw_one(self) -> Prompt:
        """The next single prompt."""
        prompt = self.prompt(self.drawn * self.order.batch_size + self.taken)
        self.taken += 1
        if self.taken == self.order.batch_size:
            self.drawn, self.taken = self.drawn + 1, 0
        return prompt

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt with this ordinal, wherever the stream is."""
        drawn, place = divmod(ordinal, self.order.batch_size)
        return replace(self.data[self.order.batch(drawn)[place]], ordinal=ordinal)

    def state(self) -> dict[str, int]:
        return {"drawn": self.drawn} | ({"taken": self.taken} if self.taken else {})

    def load(self, state: dict[str, int]) -> None:
        self.drawn, self.taken = state["drawn"], state.get("taken", 0)


class ClassRows:
    """Rows of the class of data.custom_cls, all read at once; the methods are those of trainer.data.files.Rows."""

    def __init__(
        self,
        files: Sequence[str],
        required: Sequence[str],
        optional: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        path: str,
        name: str,
    ) -> None:
        """required, optional: as in Rows. Raises ValueError, one line, for what the class cannot do, and for a missing column."""
        cls = load_class(path, name, f"data.custom_cls.path={path}")
        self._name = f"data.custom_cls.name={name}"
        wanted = {column.partition(".")[0] for column in required} | {*optional}
        try:
            config = untyped(asdict(data))
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
