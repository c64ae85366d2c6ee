"""Attacks on a run's promises: canaries are hidden in a rehearsal, and every adversary is played."""
