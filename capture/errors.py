"""The one error of this room: something could not be captured, replayed or verified."""


class CaptureFailure(Exception):
    """A readable message: which step and bucket, what happened, what to change. The caller translates it."""
