"""Integrations with inference servers. Each is imported only by a program that uses it."""
