"""`kvexport eval`: what a bounded cache still knows, at equal bytes, on tasks that are generated here."""
