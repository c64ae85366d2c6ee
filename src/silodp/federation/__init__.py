"""Parties, messages, and the round that ties them together."""
