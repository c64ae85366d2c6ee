"""Cryptographic protocols as party state machines: bytes and integers in, bytes and integers out."""
