"""``llm-datadist store``: shows what a keeper has, and drops values."""
