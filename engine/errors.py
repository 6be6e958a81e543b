"""The errors that a user can meet, each with the exit status of the command that raised it.

    DraftgraphError                 one readable message, never a traceback
    |-- UsageError      exit 2      the command line or the profile
    |-- DataError       exit 3      conversations, shards, tokens
    |-- CaptureError    exit 4      warm-up, capture, verification
    |-- RunError        exit 5      the run itself: checkpoints, devices, numbers gone bad
    `-- Interrupted     exit 130    stopped by a signal, after a checkpoint

A message says what happened, where (file, line, key, bucket), what was expected and found, and what to try.
"""


class DraftgraphError(Exception):
    """An expected error: the command prints its message and exits with `exit_status`."""

    exit_status = 1


class UsageError(DraftgraphError):
    exit_status = 2


class DataError(DraftgraphError):
    exit_status = 3


class CaptureError(DraftgraphError):
    exit_status = 4


class RunError(DraftgraphError):
    exit_status = 5


class Interrupted(DraftgraphError):
    exit_status = 130
