"""An artifact for the platforms that serve models: what they read is written, none of them is run here."""
