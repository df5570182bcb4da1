"""``llm-datadist replay``: a request trace through a prefill and a decode process."""
