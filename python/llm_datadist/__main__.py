"""The command ``python -m llm_datadist``."""

import sys

from llm_datadist.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
