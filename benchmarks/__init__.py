"""Measurements of speed, and their results as files. Never run as tests."""
