"""Attacks on what a run promises, settings of other frameworks checked, and signed reports."""
