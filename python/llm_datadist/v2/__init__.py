"""Import paths that existing clients use. Re-exports only."""
