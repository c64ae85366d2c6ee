"""Drafts for authorities and registries: the facts of a run filled in, the judgements left open.

What each form asks for: GDPR Art. 35(7); 45 CFR 164.514(b)(1); NIST SP 800-226, Fig. 1; the fields of the public
registry of deployments, opendp/deployments-registry-data; and the trade-offs that the abstract of a W3C draft Note for
reviewers names (12 February 2026; its text was not at hand). No form says that a model or a table is harmless: that is
a judgement, and marked TO DO.
"""

from __future__ import annotations

import re
from pathlib import Path

from silodp.accounting.guarantee import format_epsilon
from silodp.errors import lookup
from silodp.report.facts import ReportData
from silodp.report.formatting import render
from silodp.report.guarantee_text import IF_DEPLOYED, describe_guarantee, format_guarantees
from silodp.runtime.run_files import ATTACK, GUARANTEE, digest_file
from silodp.wire.files import write_durably
from silodp_audit.report.attacks import read_attack
from silodp_audit.report.checklist import refuse_existing

TEMPLATES = {
    "dpia": "dpia.md",
    "hipaa": "hipaa.md",
    "nist": "nist.md",
    "registry": "registry.yaml",
    "w3c": "w3c.md",
}
"""The names of the forms, and of their files in the directory of a run."""
OPEN = "TO DO"
"""Marks what a person has to fill in."""


def write_form(directory: Path, facts: ReportData, name: str, path: Path | None = None) -> tuple[Path, int]:
    """Write a draft; a file that is there is never replaced.

    Args:
        directory: The directory of the run.
        facts: What its files state.
        name: One of `TEMPLATES`.
        path: The file to write; None: in the directory of the run.

    Returns:
        (the path, the number of places that are left open).

    Raises:
        SilodpError: there is no such form (argument.value), or there is such a file (report.exists).
    """
    file = lookup(name, TEMPLATES, "template")
    path = path or directory / file
    refuse_existing(path)
    text = compose_form(directory, facts, name)
    write_durably(path, text.encode())
    return path, text.count(OPEN)


def compose_form(directory: Path, facts: ReportData, name: str) -> str:
    """Return the text of a form."""
    guarantees, attack = list(facts.run.guarantees.values()), read_attack(directory, facts.run.guarantees)
    epsilon = facts.released.epsilon
    text = render(
        Path(__file__).with_name(f"form_{name}.jinja"),
        facts=facts,
        caveats=_list_caveats(facts),
        guarantees=[describe_guarantee(one, facts.run.attacks.get(one.adversary)) for one in guarantees],
        spending=format_guarantees(guarantees),
        attack=None if attack is None else digest_file(directory / ATTACK),
        views=[] if attack is None else attack.describe_views(),
        guarantee=digest_file(directory / GUARANTEE),
        # A registry wants a number; it is rounded up as everywhere.
        epsilon=None if epsilon is None else float(format_epsilon(epsilon)),
    )
    # Macros leave blank lines around what they return.
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _list_caveats(facts: ReportData) -> list[str]:
    """Return what a reader has to know before any number of a form."""
    found = []
    if facts.run.audit is None:
        found.append(
            "Not checked: the ledger of the run is missing, and every ε is what guarantee.json states."
        )
    found += [alarm.sentence for alarm in facts.run.alarms]
    if not facts.released.private:
        found.append(f"No guarantee for released models: {facts.released.reason or 'no noise was added'}.")
    if any(not one.releasable for one in facts.private):
        found.append(
            "Not for release: the noise came from a fixed seed. The ε are those of the same run with secret noise."
        )
    if facts.private and facts.run.summary["simulation"]:
        found.append(f"A simulation: whoever ran it could read every record. {IF_DEPLOYED}")
    return found
