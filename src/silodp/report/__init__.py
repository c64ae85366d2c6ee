"""Reports of finished runs: the audit against the ledger, and the page."""
