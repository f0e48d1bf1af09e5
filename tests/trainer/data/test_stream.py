from typing import Any, cast

from trainer.data.dataset import Prompt
from trainer.data.order import DataOrder
from trainer.data.stream import PromptStream

PROMPTS = [Prompt(uid, (uid,), str(uid), "math", None, {}, str(uid)) for uid in range(7)]


def make() -> PromptStream:
    return PromptStream(cast(Any, PROMPTS), DataOrder(n=7, batch_size=2, seed=3, shuffle=True))


def test_rounds_are_the_batches_of_the_order() -> None:
    stream = make()
    rounds = [[prompt.uid for prompt in stream.draw()] for _ in range(6)]
    assert rounds == [stream.order.batch(i) for i in range(6)]


def test_the_epoch_is_that_of_the_next_round() -> None:
    stream, epochs = make(), []
    for _ in range(7):
        epochs.append(stream.epoch)
        stream.draw()
    assert stream.rounds_per_epoch == 3 and epochs == [0, 0, 0, 1, 1, 1, 2]


def test_resumed_stream_continues() -> None:
    stream, resumed = make(), make()
    for _ in range(4):
        stream.draw()
    resumed.load(stream.state())
    assert [resumed.draw() for _ in range(4)] == [stream.draw() for _ in range(4)]
