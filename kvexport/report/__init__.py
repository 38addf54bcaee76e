"""Tables and plots, as text and as HTML."""
