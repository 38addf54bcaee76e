"""A device that begins the next call before the host has read the tokens of the last one changes no answer."""
