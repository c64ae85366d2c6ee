"""Protocols between two or more parties."""
