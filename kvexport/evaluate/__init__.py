"""`kvexport eval`: the quality of a bounded cache at equal bytes, on tasks that are generated here."""
