"""Exceptions by which a run ends other than by its last step; the programs turn them into exit codes."""


class CheckFailed(Exception):
    """The run did its work and found a problem; the message has one line per problem."""


Found = CheckFailed  # the name in earlier releases, which callers of run_ppo catch


class NotSaved(Exception):
    """The run did its work, but its last checkpoint is not on disk; the message is one line."""


class Stopped(Exception):
    """The run ended on request before its last step and can be resumed.

    code: exit code of the program. The message is one line and names the checkpoint from which the run resumes.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
