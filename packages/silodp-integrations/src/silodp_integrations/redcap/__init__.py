"""REDCap projects: a draft of a configuration for their raw exports, from the public data dictionary alone."""
