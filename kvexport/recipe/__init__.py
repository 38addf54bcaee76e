"""Recipes: what one may say, and reading it."""
