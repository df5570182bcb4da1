"""Tests of the native API, written from its stub alone. A package, because other folders have files of these names."""
