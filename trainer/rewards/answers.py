"""From what an engine has written to what is scored."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from trainer.data.dataset import Prompt
from trainer.rewards.scoring import Answer
from workers.batch import Batch


def to_score(prompts: Sequence[Prompt], texts: Sequence[str], answers: Batch, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """Of each row what scorers and servers are told. answers: what its rows end with are the answers' tokens."""
    finished = answers.rows["finished"].bool().tolist()
    last = [ids[len(ids) - done :].tolist() for ids, done in zip(answers.split_rows("input_ids"), finished, strict=True)]
    endings = tokenizer.batch_decode(last, skip_special_tokens=False)
    return [
        Answer(
            data_source=prompt.data_source,
            solution_str=text,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            finished=done,
            prompt=prompt.text,
            ending=ending,
            messages=prompt.messages,
        )
        for prompt, text, done, ending in zip(prompts, texts, finished, endings, strict=True)
    ]
