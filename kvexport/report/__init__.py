"""Reports of tables and plots, as text and as HTML."""
