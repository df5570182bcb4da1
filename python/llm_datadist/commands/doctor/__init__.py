"""``llm-datadist doctor``: examines a host, and measures links."""
