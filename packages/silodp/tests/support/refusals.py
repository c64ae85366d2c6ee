"""What a test expects of an error: its stable code, never its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from silodp.errors import SilodpError


@contextmanager
def refused(*codes: str) -> Iterator[pytest.ExceptionInfo[SilodpError]]:
    """A `SilodpError` with one of these codes is raised inside."""
    with pytest.raises(SilodpError) as caught:
        yield caught
    assert caught.value.code in codes, f"{caught.value.code}: {caught.value}"
