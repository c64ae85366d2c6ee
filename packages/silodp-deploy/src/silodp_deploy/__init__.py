"""A consortium of parties on machines of their own: its public folder, keys, policies, and the couriers between them.

What is exported is what a courier program calls; see docs/couriers.md. It needs the standard library alone.
"""

from silodp_deploy.courier import Reply, Request, ask_silo, give_reply, take_request

__all__ = ["Reply", "Request", "ask_silo", "give_reply", "take_request"]

PROTOCOL = 1
"""Version of what parties send each other, and of how it follows from the public folder; parties need the same.

It is raised with every change of a message, of what a silo or the server computes for one (weights, samples, noise,
masks, encryption), or of how a public folder is read. Versions of silodp with the same number run together.
"""

IDENTITY, TLS_KEY, POLICY, AUDIT, LOCK = "identity.key", "tls.key", "policy.toml", "audit.jsonl", "lock"
"""Files in the folder of a party: its keys; a silo's policy and audit log; and what its process locks."""
SETTINGS = "silo.toml"
"""In the folder of a silo: how its machine reaches the server; its operator writes it where that is needed."""
STORE, LEDGERS = "store", "ledgers"
"""Folders in the folder of a silo: the durable memory of all runs, and one ledger for each run."""
AUTHORITY, CERTIFICATES = "ca.pem", "certificates"
"""In a public folder: the certificate of the authority, and the folder with NAME.pem of every party."""
