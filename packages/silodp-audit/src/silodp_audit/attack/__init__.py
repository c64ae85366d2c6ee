"""Attacks on a run's promises: a run on canaries is made, and every adversary attacks it."""
