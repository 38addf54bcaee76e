"""Tools that are run from a checkout."""
