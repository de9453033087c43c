"""The release, which must be the same on all hosts of a mesh."""

VERSION = "0.1.0"
