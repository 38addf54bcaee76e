"""Budgets, shapes and bytes of a model's KV caches, planned from a recipe before anything is built."""
