"""Methods whose records have budgets of their own have no one ε to tune for."""

from __future__ import annotations

from pathlib import Path

from support.commands import Silodp, assert_sentence
from support.tuned import configured


def test_only_methods_for_persons_with_one_epsilon_are_tuned(tmp_path: Path, silodp: Silodp) -> None:
    path = configured(tmp_path)
    text = path.read_text()
    path.write_text(
        text[: text.index("[method]")]
        + '[method]\nname = "rpdp"\nnoise_multiplier = 5.0\nclip = 1.0\nlocal_steps = 2\nlocal_learning_rate = 0.1\n'
        + 'expected_batch_size = 10\nlargest_budget = 3.0\n[budgets]\ndistribution = "mixture"\nof = "records"\n'
    )
    outcome = silodp("plan", path, "--tune", "--target-epsilon", 2)
    assert_sentence(outcome, code="argument.conflict")
