"""The lifetime ε of a silo adds up what one person spends, so a person must be the same thing in all its runs.

Without the comparison two consortia on one table, one with the patient as the key and one with the visit, were added up
as if a visit were a person: 5.8 was stated where 345 holds for a person with 25 visits.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from silodp.accounting.events import Gaussian
from silodp.accounting.views import ADVERSARIES
from silodp.config.resolve import load_config
from silodp.data.identity import IdentityProfile
from silodp.runtime.silo import make_ledger
from silodp.wire.messages import Message
from silodp.wire.transport import SERVER, sign
from silodp_deploy.acceptance import describe_agreement, write_policy
from silodp_deploy.consortium import Consortium
from silodp_deploy.policy import Policy
from silodp_deploy.setup import draft_public, make_keys, seal_public
from silodp_deploy.silo import load_identity, open_silo
from support.deployed import TABLES
from support.refusals import refused

TABLE = "patient,visit,age,ill\np01,v01,30,no\np01,v02,31,yes\np02,v03,50,no\n"
LISTED = 'users = ["p01", "p02", "v01", "v02", "v03"]'
RUN = "a" * 32
EVENTS = dict.fromkeys(ADVERSARIES, Gaussian(5.0))
PROFILE = 'identity = "profile.toml"'


class Parties:
    """A server, two silos with their keys, and the consortia that they are asked to accept, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "north"
        (folder / "requests").mkdir()
        for name in (SERVER, "north", "south"):
            shutil.copy(make_keys(folder / name, name), folder / "requests")
        (folder / "table.csv").write_text(TABLE)

    def agree(self, user: str, index: str, study: str = "one", method: str = "") -> Consortium:
        profile = IdentityProfile(study=study, kind="code", width=3, population=9)
        (self.folder / "profile.toml").write_text(profile.to_toml())
        text = TABLES.format(user=user, index=index, more="")
        (self.folder / "config.toml").write_text(text.partition("[method]")[0] + method if method else text)
        config = load_config(self.folder / "config.toml")
        number = len(list(self.folder.glob("consortium*")))
        home = self.folder / f"consortium{number}"
        draft_public(config, home / "public", config.read_public_data())
        shutil.copytree(self.folder / "requests", home / "requests")
        return seal_public(home, "127.0.0.1", 1)

    def take_part(self, consortium: Consortium) -> None:
        """Accept, and come to the first charge."""
        self.only_open(consortium)
        with open_silo(self.home, consortium) as service:
            run = f"{len(service.lifetime.runs):032x}"
            spec, path = replace(consortium.spec, run=run), self.home / "ledgers" / f"{run}.jsonl"
            service.lifetime.runs[run] = make_ledger(spec, path, header=service._header)
            assert service._check_charge(run, EVENTS) is None
            service.lifetime.runs[run].charge(0, 0, EVENTS, "0" * 64)

    def only_open(self, consortium: Consortium) -> None:
        write_policy(self.home, consortium, str(self.folder / "table.csv"), 50.0 if self.is_new else None)
        with open_silo(self.home, consortium):
            pass

    @property
    def is_new(self) -> bool:
        return not (self.home / "policy.toml").exists()


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("patient", LISTED), ("visit", LISTED)),
        (("patient", LISTED), ("patient", LISTED.replace('"v03"', '"v04", "v03"'))),
        (("patient", PROFILE), ("visit", PROFILE)),
        (("patient", PROFILE), ("patient", PROFILE, "another")),
        (("patient", LISTED), ("patient", PROFILE)),
    ],
)
def test_a_run_in_which_a_person_is_somebody_else_is_refused(
    first: tuple[str, ...], then: tuple[str, ...], parties: Parties
) -> None:
    parties.take_part(parties.agree(*first))
    other = parties.agree(*then)
    accepted = Policy.load(parties.home / "policy.toml")
    with refused("policy.persons") as caught:
        parties.take_part(other)
    assert (parties.home / "policy.toml").read_text() == accepted.to_toml()
    digest = other.identify_persons("north").digest
    assert digest in str(caught.value)
    # The same where it was accepted before the first run, so that only the silo can see it.
    both = accepted.model_copy(update={"accepted": [*accepted.accepted, other.digest]})
    (parties.home / "policy.toml").write_text(both.to_toml())
    with refused("policy.persons"), open_silo(parties.home, other):
        pass
    # The operator answers for it that both name the same persons.
    same = both.model_copy(update={"persons": [digest]})
    (parties.home / "policy.toml").write_text(same.to_toml())
    parties.only_open(other)


@pytest.mark.parametrize("other", ["visit", "record"])
def test_whose_epsilon_was_spent_is_known_without_the_store(other: str, parties: Parties) -> None:
    """It stood in the store alone: with a store from before the first charge both were added up, 5.8 for 345."""
    first = parties.agree("patient", LISTED)
    parties.only_open(first)
    shutil.copytree(parties.home / "store", parties.folder / "backup")
    parties.take_part(first)
    shutil.rmtree(parties.home / "store")
    shutil.copytree(parties.folder / "backup", parties.home / "store")
    if other == "visit":
        then, code = parties.agree("visit", LISTED), "policy.persons"
    else:
        then, code = parties.agree("patient", LISTED, method=RECORD_LEVEL), "policy.not_allowed"
    accepted = Policy.load(parties.home / "policy.toml")
    both = accepted.model_copy(update={"accepted": [*accepted.accepted, then.digest], "methods": []})
    (parties.home / "policy.toml").write_text(both.to_toml())
    with refused(code), open_silo(parties.home, then):
        pass
    parties.take_part(first)


def test_a_run_that_was_set_up_with_other_persons_is_not_charged_for_these(parties: Parties) -> None:
    """What its ledger says of persons would be false, and a later run with the first ones would be added to it."""
    one, other = parties.agree("patient", PROFILE), parties.agree("visit", PROFILE)
    assert one.spec.digest == other.spec.digest
    for consortium in (one, other):
        parties.only_open(consortium)
    server = load_identity(parties.folder / SERVER, SERVER)
    with open_silo(parties.home, one) as service:
        service.receive(sign(Message("setup", RUN), server, "north"))
    params = np.zeros(one.spec.size, np.float32)
    update = sign(Message("update", RUN, arrays={"params": params}), server, "north")
    with open_silo(parties.home, other) as service, refused("gate.run"):
        service.receive(update)
    with open_silo(parties.home, one) as service:
        service.receive(update)


def test_declared_persons_are_the_same_as_the_first_ones_alone(parties: Parties) -> None:
    first, second = parties.agree("patient", LISTED), parties.agree("patient", PROFILE)
    parties.take_part(first)
    accepted = Policy.load(parties.home / "policy.toml")
    digests = [one.identify_persons("north").digest for one in (first, second)]
    same = accepted.model_copy(update={"accepted": [*accepted.accepted, second.digest], "persons": digests})
    (parties.home / "policy.toml").write_text(same.to_toml())
    parties.take_part(second)
    parties.take_part(first)
    with refused("policy.persons"):
        parties.only_open(parties.agree("visit", LISTED))


def test_a_wrong_column_can_be_corrected_before_the_first_charge(parties: Parties) -> None:
    wrong, right = parties.agree("visit", LISTED), parties.agree("patient", LISTED)
    parties.only_open(wrong)
    parties.take_part(right)
    parties.only_open(right)
    with refused("policy.persons"):
        parties.only_open(wrong)


RECORD_LEVEL = """
[method]
name = "ddp"
noise_multiplier = 2.0
clip = 1.0
local_steps = 1
record_sampling = 0.5
expected_batch_size = 1.0
local_learning_rate = 0.1
"""


def test_what_records_and_what_persons_spend_is_not_added_up(parties: Parties) -> None:
    """The ε of a record says nothing of a person, so one folder has runs of one unit only."""
    parties.take_part(parties.agree("patient", LISTED))
    other = parties.agree("patient", LISTED, method=RECORD_LEVEL)
    accepted = Policy.load(parties.home / "policy.toml")
    both = accepted.model_copy(update={"accepted": [*accepted.accepted, other.digest], "methods": []})
    (parties.home / "policy.toml").write_text(both.to_toml())
    both.check(other.digest, other.stated_spec, other.list_columns("north"))
    with refused("policy.not_allowed") as caught, open_silo(parties.home, other):
        pass
    assert caught.value.field == "methods"


def test_a_run_goes_on_with_the_settings_that_it_began_with(parties: Parties) -> None:
    """The silo's memory of a run is for one specification: its ledger, its noise and what it has answered."""
    noisier = '[method]\nname = "uldp-avg"\nnoise_multiplier = 6.0\nclip = 0.1\n'
    one, other = parties.agree("patient", LISTED), parties.agree("patient", LISTED, method=noisier)
    for consortium in (one, other):
        parties.only_open(consortium)
    request = sign(Message("setup", RUN), load_identity(parties.folder / SERVER, SERVER), "north")
    with open_silo(parties.home, one) as service:
        answer = service.receive(request)
    with open_silo(parties.home, other) as service, refused("gate.run"):
        service.receive(request)
    with open_silo(parties.home, one) as service:
        assert service.receive(request) == answer


def test_the_order_of_the_list_and_other_settings_change_no_person(parties: Parties) -> None:
    parties.take_part(parties.agree("patient", LISTED))
    parties.only_open(
        parties.agree("patient", 'users = ["v03", "v02", "v01", "p02", "p01"]\ntest_share = 0.2')
    )


@pytest.mark.parametrize("index", [LISTED, PROFILE])
def test_what_is_accepted_says_who_is_a_person(index: str, parties: Parties) -> None:
    consortium = parties.agree("visit", index)
    persons = describe_agreement(consortium)["persons"]
    assert persons["column"] == "visit"
    assert persons["identity_digest"] == consortium.data.identity_digest
    assert bool(persons["list_digest"]) == (index == LISTED)
    assert (persons["profile"] is None) == (index == LISTED)
