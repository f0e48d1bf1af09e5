"""Convert generated responses to the records that scorers receive."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from trainer.data.dataset import Prompt
from trainer.rewards.conversations import tokenizer_fingerprint
from trainer.rewards.scoring import Response
from workers.batch import Batch

# Hashing serialises the whole tokenizer; the policy's tokenizer never changes during a run.
_fingerprint_of = lru_cache(maxsize=1)(tokenizer_fingerprint)


def responses_to_score(
    prompts: Sequence[Prompt], texts: Sequence[str], answers: Batch, tokenizer: PreTrainedTokenizerBase, *, for_servers: bool
) -> list[Response]:
    """One record per row. answers: prompts with responses as the policy's tokens, B rows.

    for_servers: also fill in the fields about the whole sequence (prompt, special tokens, token ids), which only servers receive;
    rules see the response text alone.
    """
    finished = answers.rows["finished"].bool().tolist()
    whole: list[dict] = [{} for _ in prompts]
    if for_servers:
        tokenizer_id, rows = _fingerprint_of(tokenizer), [row.tolist() for row in answers.split_rows("input_ids")]
        tails = [row[len(prompt.prompt_ids) :] for row, prompt in zip(rows, prompts, strict=True)]
        written = tokenizer.batch_decode(tails, skip_special_tokens=False)
        whole = [
            {"prompt": prompt.text, "written": text, "messages": prompt.messages, "ids": row, "tokenizer_id": tokenizer_id}
            for prompt, text, row in zip(prompts, written, rows, strict=True)
        ]
    return [
        Response(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, done, **more)
        for prompt, text, done, more in zip(prompts, texts, finished, whole, strict=True)
    ]
