"""Packages for the tests to import, not tests."""

collect_ignore_glob = ["*"]
