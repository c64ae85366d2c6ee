"""The one error a user is meant to read."""


class SilodpError(ValueError):
    """A mistake its maker can mend: one sentence that says what, where, and what to do."""
