"""What a person sees: configuration, commands, reports, comparisons."""
