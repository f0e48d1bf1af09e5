"""From what an engine has written to what is scored."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from trainer.data.conversations import words_of
from trainer.data.dataset import Prompt
from trainer.rewards.scoring import Answer
from workers.batch import Batch

_words_of = lru_cache(maxsize=1)(words_of)  # the policy's, which stays as it is


def to_score(
    prompts: Sequence[Prompt], texts: Sequence[str], answers: Batch, tokenizer: PreTrainedTokenizerBase, *, for_servers: bool
) -> list[Answer]:
    """Of each row what its score comes from. answers: prompts and answers, as the policy's tokens. for_servers: they are told of
    the whole sequence, of which rules see the answer alone.
    """
    finished = answers.rows["finished"].bool().tolist()
    whole: list[dict] = [{} for _ in prompts]
    if for_servers:
        words, rows = _words_of(tokenizer), answers.split_rows("input_ids")
        last = [row[len(row) - done :].tolist() for row, done in zip(rows, finished, strict=True)]
        endings = tokenizer.batch_decode(last, skip_special_tokens=False)
        whole = [
            {"prompt": prompt.text, "ending": ending, "messages": prompt.messages, "ids": row.tolist(), "words": words}
            for prompt, ending, row in zip(prompts, endings, rows, strict=True)
        ]
    return [
        Answer(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, done, **more)
        for prompt, text, done, more in zip(prompts, texts, finished, whole, strict=True)
    ]
