"""Who is the same person: the public identity profile, how cells are read by it, and checks of the silos' keys."""

from __future__ import annotations

from silodp.data.identity.profile import IdentityProfile, load_profile

__all__ = ["IdentityProfile", "load_profile"]
