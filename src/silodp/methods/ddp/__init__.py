"""DDP: record-level differential privacy with several local steps under secure aggregation (Heikkilä)."""
