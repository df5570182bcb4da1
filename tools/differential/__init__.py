"""The same random calls on two versions of the package, whose results must be equal.

`python -m differential --base COMMIT` builds the package of a commit in an environment of its own (`base.py`). A player
in each environment (`player.py`) makes the same calls (`calls.py`) between two processes and writes a line for each:
the code, the text of the error, the rows that arrived, and checksums of the caches. `__main__.py` compares the lines.
Not for: what the right results are (the other tests), or speed (`benches`).
"""
