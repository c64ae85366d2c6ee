"""Reports of finished runs: the audit against the ledger, the page, and the model card."""
