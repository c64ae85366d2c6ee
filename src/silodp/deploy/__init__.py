"""A consortium of parties on machines of their own: its public folder, keys, policies, and the couriers between them.

What is exported is what a courier program calls; see docs/couriers.md. It needs the standard library alone.
"""

from silodp.deploy.courier import Reply, Request, ask_silo, give_reply, take_request

__all__ = ["Reply", "Request", "ask_silo", "give_reply", "take_request"]

STATUS = "status.json"
"""In the folder of a server or silo: how far the run is, who is connected, and the last problem."""
