"""Text to token ids: validate, template, encode."""
