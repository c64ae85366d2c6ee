"""Report sections."""
