"""Import paths that existing clients use (contract §1.2). Re-exports only."""
