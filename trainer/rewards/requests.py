"""Convert generated responses to the records that scorers receive."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from trainer.data.dataset import Prompt
from trainer.rewards.conversations import rendered, tokenizer_fingerprint
from trainer.rewards.scoring import Response
from workers.batch import Batch

# Hashing serialises the whole tokenizer; the policy's tokenizer never changes during a run.
_fingerprint_of = lru_cache(maxsize=1)(tokenizer_fingerprint)


def responses_to_score(
    prompts: Sequence[Prompt], texts: Sequence[str], answers: Batch, tokenizer: PreTrainedTokenizerBase, *, for_servers: bool
) -> list[Response]:
    """One record per row. answers: prompts with responses as the policy's tokens, B rows.

    for_servers: also fill in the fields about the whole sequence (prompt, special tokens, token ids), which only servers receive;
    rules see the response text alone. Rows of sessions (objects["session"]) have rows["prompt_length"].
    """
    finished = answers.rows["finished"].bool().tolist()
    whole: list[dict] = [{} for _ in prompts]
    if for_servers:
        tokenizer_id, rows = _fingerprint_of(tokenizer), [row.tolist() for row in answers.split_rows("input_ids")]
        starts, heads = [len(prompt.prompt_ids) for prompt in prompts], [prompt.text for prompt in prompts]
        messages, is_session = [prompt.messages for prompt in prompts], "session" in answers.objects
        if is_session:  # the prompt that it rendered has the tools, and its messages have all turns
            starts = answers.rows["prompt_length"].tolist()
            heads = tokenizer.batch_decode([row[:start] for row, start in zip(rows, starts, strict=True)])
            messages = [rendered(session["messages"]) for session in answers.objects["session"]]
        tails = [row[start:] for row, start in zip(rows, starts, strict=True)]
        written = tokenizer.batch_decode(tails, skip_special_tokens=False)
        names = ("prompt", "written", "messages", "ids")
        whole = [
            dict(zip(names, fields, strict=True), tokenizer_id=tokenizer_id, whole=is_session)
            for fields in zip(heads, written, messages, rows, strict=True)
        ]
    return [
        Response(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, done, **more)
        for prompt, text, done, more in zip(prompts, texts, finished, whole, strict=True)
    ]
