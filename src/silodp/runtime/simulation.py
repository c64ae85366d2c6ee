"""The parties of a run in one process: silos and server, their keys and stores, and what carries messages."""

from __future__ import annotations

from dataclasses import replace

from silodp.accounting.ledger import Ledger
from silodp.crypto.keys import Identity
from silodp.mechanisms.noise import Randomness
from silodp.runtime.run_directory import RunDirectory
from silodp.runtime.run_spec import Terms
from silodp.runtime.server import Server
from silodp.runtime.silo import Silo
from silodp.wire.signatures import SignedChannel, SignedParty
from silodp.wire.store import RoundStore, Store
from silodp.wire.transport import InProcess


def build_parties(
    terms: Terms, run: str, ledger: Ledger, directory: RunDirectory
) -> tuple[list[Silo], Server]:
    """As they are when a run of this id begins, or goes on from what their stores hold."""
    setting = replace(terms.setting, run=run)
    randomness = Randomness.secret() if terms.seed is None else Randomness.from_seed(terms.seed)
    stores = {name: directory.store("silos", f"{s:03}") for s, name in enumerate(setting.names)}
    # In one process the keys are made here; between organizations each makes its own and pins the others'.
    identities = {name: _identity(name, store) for name, store in stores.items()}
    pins = {name: identity.public for name, identity in identities.items()}
    silos = [
        Silo(
            data,
            terms.task,
            terms.aggregator,
            setting,
            randomness,
            stores[data.name],
            identities[data.name],
            pins,
            directory.silo_ledger(terms, setting, place),
            terms.silo_limits,
        )
        for place, data in enumerate(terms.federation.silos)
    ]
    store = directory.store("server")
    coordinator = _identity("server", store)
    parties = {silo.name: SignedParty(silo, identities[silo.name], coordinator.public) for silo in silos}
    most_bytes = max(silo.gate.most_bytes for silo in silos)
    channel = SignedChannel(InProcess(parties), coordinator, pins, most_bytes)
    return silos, Server(setting, channel, terms.aggregator, ledger, RoundStore(store), randomness)


def _identity(name: str, store: Store) -> Identity:
    """A party's long-term key, made when it is first needed."""
    seed = store.get("identity")
    if seed is None:
        identity = Identity.fresh(name)
        store.put("identity", identity.seed)
        return identity
    return Identity(name, seed)
