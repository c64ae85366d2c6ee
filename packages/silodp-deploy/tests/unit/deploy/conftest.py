"""A public folder that is drafted and not sealed yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from silodp.config.resolve import load_config
from silodp_deploy.setup import draft_public
from support.commands import CONFIG


@pytest.fixture
def public(tmp_path: Path) -> Path:
    path = tmp_path / "one.toml"
    path.write_text(CONFIG)
    config = load_config(path)
    draft_public(config, tmp_path / "public", config.read_public_data())
    return tmp_path / "public"
