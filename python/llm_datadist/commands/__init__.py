"""The commands ``llm-datadist`` and ``python -m llm_datadist``. They use the native API only."""
