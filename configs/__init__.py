"""Run configuration: the typed schema, its loader, and the YAML presets."""
