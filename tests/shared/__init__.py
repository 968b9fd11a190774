"""Definitions that several test files share."""
