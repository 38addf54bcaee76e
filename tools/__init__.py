"""Tools that people run from a checkout."""
