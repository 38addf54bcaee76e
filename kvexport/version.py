"""The version number of the package and of its distribution."""

from __future__ import annotations

__version__ = "0.1.0"
