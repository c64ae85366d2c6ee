from pathlib import Path

import pytest

from silodp.data.benchmarks import data_root
from silodp.errors import SilodpError


@pytest.fixture(scope="session")
def data() -> Path:
    """The real data sets; a test that asks for them is skipped where they are not."""
    try:
        return data_root()
    except SilodpError as error:
        pytest.skip(f"needs the shared data: {error}")
