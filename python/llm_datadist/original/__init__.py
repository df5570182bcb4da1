"""The API of LLM-DataDist, over the native API. ``llm_datadist`` loads it at the first use of one of its names."""
