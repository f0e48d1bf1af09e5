"""How a run may end other than by its last step: what its programs turn into exit codes."""


class Found(Exception):
    """The run did what it was asked to do, and found something wrong: a line for each."""


class NotSaved(Exception):
    """The run did what it was asked to do, but its end is not on disk: one line."""


class Stopped(Exception):
    """The run ended before its last step, as it was told to, and can be resumed: a line that says where."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code
