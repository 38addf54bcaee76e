"""Recipes: the YAML files that describe a deployment, their fields, and how they are read."""
